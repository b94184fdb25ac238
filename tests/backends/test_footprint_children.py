"""Which child a meter asks, and when it starts and ends one; but for one they start at once."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mucudnn.backends.base import Job
from mucudnn.backends.cpu import footprint
from mucudnn.backends.cpu.footprint import CHILD_MODULE, FootprintMeter, _Child
from mucudnn.errors import BackendError, UnweighableError
from tests.alone import Server
from tests.backends import light_child
from tests.forks import in_a_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux caps and tells memory")

MIB = 2**20

LIGHT_MODULE = light_child.__name__


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have meters start children that load nothing."""
    monkeypatch.setattr(footprint, "CHILD_MODULE", LIGHT_MODULE)


@pytest.fixture
def meter() -> Iterator[FootprintMeter]:
    with FootprintMeter() as meter:
        yield meter


def _taking(n_bytes: int, seconds: float = 0.0) -> Job:
    return Job("take", {"bytes": n_bytes, "seconds": seconds})


def _pid(meter: FootprintMeter) -> int:
    with pytest.raises(BackendError, match="pid") as caught:
        meter.measure(Job("tell", {}), None)
    return int(str(caught.value).rpartition(" ")[2].rstrip("."))


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_child_that_is_killed_at_work_is_an_error_and_the_next_job_gets_another(
    meter: FootprintMeter,
) -> None:
    with pytest.raises(BackendError, match="its process died: SIGKILL"):
        meter.measure(Job("die", {"signal": signal.SIGKILL}), MIB)

    assert meter.measure(_taking(0), MIB).n_bytes == 0


def test_a_child_that_is_killed_at_rest_is_replaced_unseen(meter: FootprintMeter) -> None:
    pid = _pid(meter)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    assert meter.measure(_taking(0), MIB).n_bytes == 0


def test_a_job_that_is_stuck_is_ended() -> None:
    with FootprintMeter() as meter:
        pid = _pid(meter)
        meter._timeout_s = 0.5
        with pytest.raises(BackendError, match=r"A job must end within 0\.5 seconds"):
            meter.measure(_taking(0, seconds=60.0), None)

        assert not _runs(pid)


def test_closing_ends_the_child_and_a_closed_meter_starts_another(meter: FootprintMeter) -> None:
    first = _pid(meter)
    meter.close()

    assert not _runs(first)
    assert _runs(second := _pid(meter))
    meter.close()
    assert not _runs(second)


def test_a_child_without_work_ends_and_the_next_job_has_another(
    meter: FootprintMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(footprint, "CHILD_MODULE", CHILD_MODULE)  # which is the one that looks at the clock
        meter._child = first = _Child(idle_s=0.1)  # it is asked for nothing, so no job can come too late
    assert first._process.wait(60) == 0

    assert _runs(second := _pid(meter))

    assert first._process.pid != second


def test_a_child_that_is_about_to_end_gets_no_job() -> None:
    with FootprintMeter(idle_s=600) as meter:
        first = _pid(meter)
        assert meter._child is not None
        for _ in range(2):
            meter._child._heard_s -= 200  # a job each 200 seconds keeps it
            assert _pid(meter) == first
        meter._child._heard_s -= 301

        assert _pid(meter) != first
        assert not _runs(first)


def test_a_meter_without_work_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # to start one raises

    with FootprintMeter() as meter:
        assert meter._child is None
        meter.close()
        assert meter._child is None


def test_a_child_that_cannot_start_is_an_error(
    meter: FootprintMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(UnweighableError, match="cannot be measured here: exit status 1"):
        meter.measure(_taking(0), None)


def test_an_interpreter_that_cannot_be_run_is_named(
    meter: FootprintMeter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "python"
    text.touch(mode=0o600)
    monkeypatch.setattr(sys, "executable", str(text))

    with pytest.raises(UnweighableError, match=f"measured here: {text} cannot be run: Permission denied\\.$"):
        meter.measure(_taking(0), None)


def test_a_child_for_which_there_is_no_file_is_an_error_of_weighing(
    meter: FootprintMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)

    with pytest.raises(UnweighableError, match="no temporary file can be made: Too many open files"):
        meter.measure(_taking(0), None)


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(UnweighableError, match="on Linux only, but this is darwin"):
        FootprintMeter()


_LEFT_OPEN = f"""
import os, warnings
warnings.simplefilter("error", ResourceWarning)
from mucudnn.backends.base import Job
from mucudnn.backends.cpu import footprint

footprint.CHILD_MODULE = {LIGHT_MODULE!r}
meter = footprint.FootprintMeter()
job = Job("take", {{"bytes": 2**20, "seconds": 0.0}})
meter.measure(job, None)
child = meter._child._process.pid
if (forked := os.fork()) == 0:
    meter.close()
    raise SystemExit
assert os.waitpid(forked, 0)[1] == 0
meter.measure(job, None)
assert meter._child._process.pid == child
print(child)
"""


def test_a_fork_leaves_the_child_alone_and_the_end_of_the_interpreter_ends_it(alone: Server) -> None:
    finished = alone.finished(_LEFT_OPEN)

    assert (finished.returncode, finished.stderr) == (0, "")
    assert not _runs(int(finished.stdout))


def test_a_fork_while_another_thread_starts_a_child_leaves_two_meters_that_can_be_used(
    meter: FootprintMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_starting, start = threading.Event(), subprocess._fork_exec  # type: ignore[attr-defined]
    weighed, tell_weighed = os.pipe()

    def start_later(*arguments: Any) -> object:
        is_starting.set()
        time.sleep(0.1)  # by when a fork that waited for nobody is over
        return start(*arguments)

    def is_usable() -> bool:
        signal.alarm(20)  # instead of waiting for a parent that waits for this process to end
        meter.close()
        os.close(tell_weighed)
        return os.read(weighed, 1) == b""

    monkeypatch.setattr(subprocess, "_fork_exec", start_later)
    with ThreadPoolExecutor(1) as pool:
        weighing = pool.submit(meter.measure, _taking(0), None)
        weighing.add_done_callback(lambda _: os.close(tell_weighed))
        is_starting.wait()
        found = in_a_child(is_usable)
        assert weighing.result().n_bytes == 0
    os.close(weighed)

    assert found


def test_what_a_signal_handler_weighs_meanwhile_is_not_taken_for_the_others(meter: FootprintMeter) -> None:
    inner: list[int | None] = []

    def weigh(_number: int, _frame: object) -> None:
        inner.append(meter.measure(_taking(4 * MIB), None).n_bytes)

    _pid(meter)  # a child is there
    former = signal.signal(signal.SIGALRM, weigh)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        outer = meter.measure(_taking(MIB, seconds=0.5), None).n_bytes
    finally:
        signal.signal(signal.SIGALRM, former)

    assert (inner, outer) == ([4 * MIB], MIB)
