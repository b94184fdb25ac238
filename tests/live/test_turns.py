"""One at a time measures on a device."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mucudnn.errors import BusyWarning
from mucudnn.live import turns
from mucudnn.live.turns import turn, turn_path
from mucudnn.timing import nothing
from tests.examples import an_environment


def test_threads_have_it_one_after_another(tmp_path: Path) -> None:
    at_once, most, turns = 0, 0, 0
    counting = threading.Lock()

    def measure() -> None:
        nonlocal at_once, most, turns
        for _ in range(5):
            with turn(tmp_path / "lock", nothing):
                with counting:
                    at_once, turns = at_once + 1, turns + 1
                    most = max(most, at_once)
                time.sleep(0.001)
                with counting:
                    at_once -= 1

    threads = [threading.Thread(target=measure) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (most, turns) == (1, 15)


HOLDER = """
import sys
from pathlib import Path
from mucudnn.timing import nothing
from mucudnn.live.turns import turn
with turn(Path(sys.argv[1]), nothing):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", [lambda process: process.stdin.close(), lambda process: process.kill()])
def test_whoever_has_to_wait_is_told_once_and_goes_on_when_the_other_ends(
    tmp_path: Path, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    path, waited = tmp_path / "lock", []
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mine\n"

        def wait() -> None:
            waited.append("asked")
            end(holder)

        with turn(path, wait):
            waited.append("had it")

    assert waited == ["asked", "had it"]


def test_it_is_given_back_when_measuring_fails(tmp_path: Path) -> None:
    waited: list[str] = []
    with pytest.raises(RuntimeError, match="broken"), turn(tmp_path / "lock", nothing):
        raise RuntimeError("broken")

    with turn(tmp_path / "lock", lambda: waited.append("asked")):
        pass

    assert waited == []


def test_an_error_of_what_is_measured_is_not_taken_for_one_of_the_lock(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no memory"), turn(tmp_path / "lock", nothing):
        raise OSError("no memory")


def test_whoever_waits_for_long_is_told_again_and_then_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()  # one from each look at the clock to the next, however long that takes
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(turns, "_SLICE_S", 0.05)
    waited: list[str] = []
    with turn(tmp_path / "lock", nothing):
        start = time.monotonic()
        with (
            pytest.warns(
                BusyWarning,
                match="Somebody else has been measuring on this device for 4 s. This process waits no longer",
            ),
            turn(tmp_path / "lock", lambda: waited.append("asked"), patience_s=4),
        ):
            waited.append("measured")

    assert time.monotonic() - start >= 4 * 0.05
    assert waited == [*["asked"] * 4, "measured"]


def test_an_error_of_who_is_told_is_not_taken_for_one_of_the_lock(tmp_path: Path) -> None:
    def broken() -> None:
        raise BrokenPipeError("nobody reads")

    with (
        turn(tmp_path / "lock", nothing),
        pytest.raises(BrokenPipeError, match="nobody reads"),
        turn(tmp_path / "lock", broken),
    ):
        pass


def test_a_file_system_that_warns_of_its_locks_is_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warning(*_: object, **__: object) -> None:
        raise UserWarning("flock not supported on this filesystem")

    monkeypatch.setattr(turns.FileLock, "acquire", warning)

    with turn(tmp_path / "lock", nothing):
        pass


def test_where_no_lock_can_be_had_it_goes_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = []

    with turn(tmp_path / "file" / "lock", nothing):
        ran.append("measured")

    assert ran == ["measured"]


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"policy": {"threads": "1"}}, True),
        ({"device": {"name": "Example 9000", "processors": "1", "processor quota": "5 9"}}, True),
        ({"software": {"torch": "1"}}, True),
        ({"device": {"name": "Another"}}, False),
        ({"backend": "cudnn"}, False),
    ],
)
def test_all_who_measure_on_a_device_meet_at_one_file(changes: dict[str, object], is_same: bool) -> None:
    assert (turn_path(an_environment(**changes)) == turn_path(an_environment())) == is_same
