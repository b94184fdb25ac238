"""What is left of the measurements when a process ends in the middle of them."""

import argparse
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.gpu import hanging, program, results, watch
from bench.gpu.hanging import status_of

NAMES = ["device", "engines", "plans"]

_CHILD = """
import os, pathlib, sys
deadly, folder, *names = sys.argv[1:]
for name in names:
    pathlib.Path(folder, name + ".json").write_text("{}")
    if name == deadly:
        os.abort()
    if name == "lost":
        sys.exit(3)
pathlib.Path(folder, "README.md").write_text("all")
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The sections that each process was asked for; the process aborts in the one called "engines"."""
    asked: list[list[str]] = []

    def command(
        _options: argparse.Namespace, folder: Path, _seconds: float, names: Sequence[str]
    ) -> list[str]:
        asked.append(list(names))
        return [sys.executable, "-c", _CHILD, "engines", str(folder), *names]

    monkeypatch.setattr(watch, "_command", command)
    return asked


def options(names: Sequence[str]) -> argparse.Namespace:
    return argparse.Namespace(seconds=60.0, device=0, output=None, only=list(names))


def test_sections_after_the_one_that_ended_the_process_run_in_another(
    runs: list[list[str]], tmp_path: Path
) -> None:
    status = watch.watched(options(NAMES), tmp_path)

    assert runs == [NAMES, ["plans"]]
    assert status == 0
    assert all(results.path_of(tmp_path, name).exists() for name in NAMES)


def test_sections_after_the_one_that_lost_the_card_run_in_another_process_which_concludes(
    runs: list[list[str]], tmp_path: Path
) -> None:
    status = watch.watched(options(["device", "lost", "plans"]), tmp_path)

    assert runs == [["device", "lost", "plans"], ["plans"]]
    assert (status, (tmp_path / "README.md").read_text()) == (0, "all")


def test_a_process_is_told_what_is_left_of_the_time_and_of_the_sections(tmp_path: Path) -> None:
    given = program.parsed(["--device", "1"])

    command = watch._command(given, tmp_path, -2.5, ["own", "calls"])

    found = program.parsed(command[3:])
    assert (found.device, found.output, found.seconds) == (1, str(tmp_path), 1.0)
    assert found.only == ["own", "calls"]


def test_the_readme_is_written_even_if_the_last_process_dies(
    runs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        program, "conclude", lambda *asked: 1 if asked == (tmp_path, ["device", "engines"]) else 2
    )

    assert watch.watched(options(["device", "engines"]), tmp_path) == 1
    assert runs == [["device", "engines"]]


def test_a_process_that_begins_no_section_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])

    assert watch.watched(options(NAMES), tmp_path) == 3


def test_a_process_that_hangs_before_any_section_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(watch, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    hurried = options(NAMES)
    hurried.seconds = 0.1

    assert watch.watched(hurried, tmp_path) == 1
    assert capfd.readouterr().err.startswith("Killed: ")


def test_results_of_an_earlier_run_are_not_taken_for_this_one(runs: list[list[str]], tmp_path: Path) -> None:
    results.path_of(tmp_path, "plans").write_text("old")
    (tmp_path / "README.md").write_text("old")

    watch.watched(options(["plans"]), tmp_path)

    assert results.path_of(tmp_path, "plans").read_text() == "{}"
    assert (tmp_path / "README.md").read_text() == "all"


def test_a_command_that_is_interrupted_concludes(tmp_path: Path) -> None:
    child = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: time.sleep(1) or open('done', 'w').close())\n"
        "signal.pause()\n"
    )
    parent = (
        "import os, signal, sys, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever began this may ignore it
        "from bench.gpu.hanging import status_of\n"
        "threading.Timer(2, lambda: os.killpg(0, signal.SIGINT)).start()\n"
        f"status_of([sys.executable, '-c', {child!r}], 60)\n"
    )
    root = Path(__file__).parents[2]

    ended = subprocess.run(
        [sys.executable, "-c", parent], cwd=tmp_path, check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(root)}, start_new_session=True, timeout=60,
    )  # fmt: skip

    assert "KeyboardInterrupt" in ended.stderr
    assert (tmp_path / "done").exists()


CONCLUDES = (
    "import os, time; from bench.gpu.hanging import heed_termination; {heeds}\n"
    "try: open('begun', 'w').close(), time.sleep(60)\n"
    "except KeyboardInterrupt: time.sleep(1.5), open('done', 'w').close()"
)
"""A program that takes a while to say what it was at; an interrupt meanwhile would break that off."""


@pytest.mark.parametrize("interrupt", ["default_int_handler", "SIG_IGN"])  # as in a shell's background
@pytest.mark.parametrize(
    ("heeds", "is_group"), [("", False), ("heed_termination()", False), ("heed_termination()", True)]
)
def test_a_program_that_is_terminated_and_what_it_has_begun_conclude_as_after_an_interrupt(
    tmp_path: Path, heeds: str, is_group: bool, interrupt: str
) -> None:
    if interrupt == "SIG_IGN":
        heeds = "heed_termination()"  # who heeds neither signal cannot conclude
    parent = (
        "import signal, sys; from bench.gpu.hanging import heed_termination, status_of\n"
        f"signal.signal(signal.SIGINT, signal.{interrupt})\n"
        "heed_termination()\n"
        f"try: status_of([sys.executable, '-c', {CONCLUDES.format(heeds=heeds)!r}], 60)\n"
        "except KeyboardInterrupt: sys.exit(130 if open('done') else 1)\n"
    )
    root = str(Path(__file__).parents[2])
    program = subprocess.Popen(
        [sys.executable, "-c", parent],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    while not (tmp_path / "begun").exists():
        assert program.poll() is None
        time.sleep(0.02)

    (os.killpg if is_group else os.kill)(program.pid, signal.SIGTERM)

    assert program.wait(30) == 130
    assert (tmp_path / "done").exists()


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", ["", ".program", ".layer_run", ".layer_child", ".steps", ".rest"])
def test_every_program_that_begins_others_or_keeps_what_it_finds_heeds_termination(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    heeded: list[str] = []
    monkeypatch.setattr(hanging, "heed_termination", lambda: heeded.append(name))
    monkeypatch.setattr(sys, "argv", ["program", "--help"])

    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(f"bench.gpu{name}", run_name="__main__", alter_sys=True)

    assert heeded == [name]


def begins_another(folder: Path, grandchild: str) -> list[str]:
    """Return the command of a process in a folder, which begins another one and waits for it."""
    noted = f"import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); {grandchild}"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {noted!r}])"
    return [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); {child}"]


def test_what_a_killed_command_has_begun_has_ended_with_it(tmp_path: Path) -> None:
    # Much memory goes back page by page: it is there after the process that began it has ended.
    command = begins_another(tmp_path, "held = bytearray(os.urandom(1)) * 2**29; time.sleep(60)")

    assert status_of(command, 5.0) == 1

    assert not _is_running(int((tmp_path / "pid").read_text()))


DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"


@pytest.mark.parametrize("heeds", [False, True])
def test_what_does_not_heed_an_interrupt_is_killed_though_what_began_it_has_ended(
    tmp_path: Path, heeds: bool
) -> None:
    name, path, program = begins_another(tmp_path, DEAF)
    mine = "signal.SIG_IGN" if not heeds else "lambda *_: os._exit(130)"
    command = [name, path, f"import os, signal; signal.signal(signal.SIGINT, {mine}); {program}"]

    assert status_of(command, 3.0, concluding_s=1.0) == 1

    assert not _is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("ends_first", "takes_s"), [(False, 0), (True, 1)])
def test_what_is_stopped_and_what_it_has_begun_may_say_what_they_were_at(
    tmp_path: Path, ends_first: bool, takes_s: int
) -> None:
    concludes = f"time.sleep({takes_s}), open('done', 'w').close(), os._exit(0)"
    slow = f"import signal; signal.signal(signal.SIGINT, lambda *_: ({concludes})); time.sleep(60)"
    name, path, program = begins_another(tmp_path, slow)
    first = (
        "import os, signal; signal.signal(signal.SIGINT, lambda *_: os._exit(130)); " if ends_first else ""
    )
    start_s = time.monotonic()

    assert status_of([name, path, first + program], 3.0, concluding_s=20.0) == 1

    assert (tmp_path / "done").exists()
    assert time.monotonic() - start_s < 20.0


def test_who_is_interrupted_and_waits_for_the_deaf_says_so_before_it_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from bench.gpu.hanging import status_of; "
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell's background may ignore
        f"os.chdir({str(tmp_path)!r}); deaf = ['import time; ' + {DEAF!r}]\n"
        "try: status_of([sys.executable, '-c', *deaf], None, interrupted_s=1.0)\n"
        "except KeyboardInterrupt: open('done', 'w').close()"
    )

    assert status_of([sys.executable, "-c", program], 5.0, concluding_s=20.0) == 1

    assert (tmp_path / "done").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it is running still
def test_a_process_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)  # as in a call of a driver that never ends
    monkeypatch.setattr(hanging, "DYING_S", 0.2)
    start_s = time.monotonic()

    assert status_of([sys.executable, "-c", "import time; time.sleep(15)"], 0.2) == 1

    assert time.monotonic() - start_s < 10.0


def _is_running(pid: int) -> bool:
    """Whether a process is there, and has not ended unseen by whoever takes in orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
