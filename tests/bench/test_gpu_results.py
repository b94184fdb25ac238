"""How sections run and fail, and what is written of them."""

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bench.gpu import available, install, program, results
from bench.gpu.contest import in_time
from bench.gpu.ground import LOST
from bench.gpu.layers import MIDDLING
from bench.gpu.sections import Deadline, Section, Task, attempted, run_section
from bench.gpu.values import Answer, Timing, duration, jsonable
from mucudnn.profile import Measurement
from mucudnn.version import __version__

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True)
class Found:
    """What these tests find."""

    layer: str
    workspace_bytes: int | None
    time: Timing | None = None


class Card:
    """A card that works, or not."""

    def __init__(self) -> None:
        self.is_broken = False

    def clock(self) -> int:
        if self.is_broken:
            raise RuntimeError("an illegal memory access was encountered")
        return 0


class Ground:
    """As much of a card as the running of sections asks for."""

    name = "NVIDIA H200"

    def __init__(self) -> None:
        self.card = Card()

    def current(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def finds(task: Task) -> Iterator[object]:
    yield Found("a", 2**20)
    yield Found("b", None)


def fails_late(task: Task) -> Iterator[object]:
    yield Found("a", 0)
    raise ValueError("the second row is missing")


def breaks(task: Task) -> Iterator[object]:
    yield Found("a", 0)
    task.ground.card.is_broken = True
    raise RuntimeError("illegal memory access")


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    yield Answer("How many?", str(len(rows)))


def section(name: str, rows: object = finds) -> Section:
    return Section(name, f"About {name}", rows, answers, share=1)


def a_task() -> Task:
    return Task(Ground(), {}, MIDDLING, {}, Deadline(3600))


def test_a_section_that_fails_keeps_its_rows_and_tells_why() -> None:
    result = run_section(section("plans", fails_late), a_task())

    assert result.rows == (Found("a", 0),)
    assert result.failure is not None
    assert result.failure.startswith("failed: ")
    assert result.failure.endswith("ValueError: the second row is missing")
    assert result.answers == (
        Answer("About plans", "failed: ValueError: the second row is missing"),
        Answer("How many?", "1"),
    )


def test_answers_that_fail_are_a_failure_of_the_section() -> None:
    def none(rows: Sequence[object]) -> Iterator[Answer]:
        raise ZeroDivisionError("division by zero")

    result = run_section(dataclasses.replace(section("plans"), answers=none), a_task())

    assert len(result.rows) == 2
    assert result.answers == (Answer("About plans", "failed: ZeroDivisionError: division by zero"),)


def test_a_section_is_timed() -> None:
    clock = itertools.count(0, 3_000_000_000)

    assert run_section(section("plans"), a_task(), lambda: next(clock)).seconds == 3.0


def test_a_deadline_is_over_when_its_seconds_are() -> None:
    clock = iter([0, 1_999_999_999, 2_000_000_000])
    deadline = Deadline(2, lambda: next(clock))

    assert [deadline.is_over, deadline.is_over] == [False, True]


@pytest.mark.parametrize(("cases", "end"), [(8, 3), (2, 6), (1, 6)])
def test_a_case_may_take_twice_its_share_of_what_is_left_and_no_more_than_that(cases: int, end: int) -> None:
    clock = iter([0, 2, 2, end - 0.001, end])  # four of six seconds are left

    shorter = Deadline(6, lambda: round(next(clock) * 1e9)).shared(cases)

    assert [shorter.is_over, shorter.is_over] == [False, True]


def test_an_attempt_that_fails_gives_the_first_line_of_its_reason() -> None:
    def fails() -> int:
        raise ValueError("first line\nsecond line")

    assert attempted(Ground(), fails) == (None, "first line")
    assert attempted(Ground(), lambda: 1) == (1, None)


def test_an_attempt_that_breaks_the_card_ends_the_section() -> None:
    ground = Ground()

    def fails() -> int:
        ground.card.is_broken = True
        raise RuntimeError("misaligned address")

    with pytest.raises(RuntimeError, match="misaligned address"):
        attempted(ground, fails)


def test_one_failure_stops_no_other_section_and_gives_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = (section("device", fails_late), section("plans"))
    monkeypatch.setattr(program, "SECTIONS", chosen)

    status = program.measure(Ground(), chosen, tmp_path, 60)

    assert status == 1
    assert json.loads((tmp_path / "plans.json").read_text())["failure"] is None
    assert "Failed or missing: device." in capsys.readouterr().out


def test_without_a_failure_the_status_is_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = (section("device"), section("plans"))
    monkeypatch.setattr(program, "SECTIONS", chosen)

    assert program.measure(Ground(), chosen, tmp_path, 60) == 0
    printed = capsys.readouterr().out
    assert "2 rows  done" in printed
    assert "How many?" in printed


def test_what_was_not_asked_and_is_not_there_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = (section("device"), section("plans"), section("own", fails_late))
    monkeypatch.setattr(program, "SECTIONS", every)

    assert program.measure(Ground(), every[:1], tmp_path, 60) == 0
    assert program.measure(Ground(), every[2:], tmp_path, 60) == 1
    assert program.measure(Ground(), every[1:2], tmp_path, 60) == 1  # what failed before is there


def test_after_a_fault_the_other_sections_and_the_conclusion_are_left_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = (section("device", breaks), section("own"), section("plans"))
    monkeypatch.setattr(program, "SECTIONS", chosen)

    assert program.measure(Ground(), chosen, tmp_path, 60) == LOST
    assert [path.name for path in tmp_path.iterdir()] == ["device.json"]


def test_a_fault_in_the_last_section_leaves_nothing_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = (section("device"), section("own", breaks))
    monkeypatch.setattr(program, "SECTIONS", chosen)

    assert program.measure(Ground(), chosen, tmp_path, 60) == 1
    assert (tmp_path / "README.md").exists()


def test_old_results_of_a_section_go_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.json").write_text("old")
    chosen = (section("device", breaks), section("own"))
    monkeypatch.setattr(program, "SECTIONS", chosen)

    program.measure(Ground(), chosen, tmp_path, 60)

    assert not (tmp_path / "own.json").exists()


def test_what_a_section_leaves_of_its_time_is_for_the_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(program, "Deadline", lambda seconds: asked.append(seconds) or Deadline(seconds))
    chosen = (section("device"), dataclasses.replace(section("plans"), share=3))
    monkeypatch.setattr(program, "SECTIONS", chosen)

    program.measure(Ground(), chosen, tmp_path, 60)

    assert asked == [pytest.approx(15, abs=1), pytest.approx(60, abs=1)]


def test_an_extra_section_runs_where_it_is_named_and_is_not_missed_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, extra = (section("device"),), (section("more", fails_late),)
    monkeypatch.setattr(program, "SECTIONS", usual)
    monkeypatch.setattr(program, "EXTRA", extra)

    assert program.parsed([]).only == ["device"]
    assert program.parsed(["--only", "more"]).only == ["more"]
    assert program.measure(Ground(), usual, tmp_path, 60) == 0
    assert program.measure(Ground(), extra, tmp_path, 60) == 1
    assert "Failed or missing: more." in capsys.readouterr().out


def test_the_sections_have_names_of_their_own_and_the_longest_are_last_but_for_captures() -> None:
    names = [each.name for each in program.SECTIONS]

    assert len(set(names)) == len(names) == 13
    assert not set(names) & {each.name for each in program.EXTRA}
    longest = sorted(program.SECTIONS, key=lambda each: each.share)[-3:]
    assert {each.name for each in longest} == {each.name for each in program.SECTIONS[-4:-1]}
    assert program.SECTIONS[-1].name == "capture"


def test_without_a_gpu_one_sentence_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert program.main([]) == 1

    told = capsys.readouterr().err
    assert told.startswith("make gpu needs an NVIDIA GPU, but torch ")
    assert told.count("\n") == 1


def test_with_a_gpu_nothing_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    assert available.obstacle() is None


@pytest.mark.parametrize(
    ("name", "folder"), [("NVIDIA H200", "nvidia-h200"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb")]
)
def test_a_folder_is_named_after_the_card(name: str, folder: str) -> None:
    assert results.slug(name) == folder


def test_a_file_has_every_row_in_a_line_of_its_own(tmp_path: Path) -> None:
    results.write(tmp_path, run_section(section("plans"), a_task()), NOW)

    text = (tmp_path / "plans.json").read_text()
    assert '\n{"layer": "a", "workspace_bytes": 1048576, "time": null},\n' in text
    content = json.loads(text)
    assert content["date"] == "2026-01-02T03:04:05+00:00"
    assert content["tables"]["Found"]["title"] == "What these tests find."
    assert [row["layer"] for row in content["tables"]["Found"]["rows"]] == ["a", "b"]


def test_every_file_says_with_which_version_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_present_commit", lambda: "0123456789ab")

    results.write(tmp_path, run_section(section("plans"), a_task()), NOW)

    contents = results.read(tmp_path, ["plans"])
    assert (contents["plans"]["version"], contents["plans"]["commit"]) == (__version__, "0123456789ab")
    assert f" s, mucudnn {__version__}, commit 0123456789ab\n" in results.readme(contents)


def test_a_section_without_rows_is_written_too(tmp_path: Path) -> None:
    empty = run_section(section("plans", lambda _: iter(())), a_task())

    results.write(tmp_path, empty, NOW)

    assert results.read(tmp_path, ["device", "plans"])["plans"]["tables"] == {}


def test_the_readme_has_answers_and_tables_with_units(tmp_path: Path) -> None:
    timing = Timing.of(Measurement((1_000_000, 1_100_000, 1_200_000, 1_300_000, 1_400_000, 1_500_000), 10))
    rows = [Found("a", 3 * 2**20, timing), Found("b", None)]
    results.write(tmp_path, run_section(section("plans", lambda _: iter(rows)), a_task()), NOW)

    text = results.readme(results.read(tmp_path, ["plans"]))

    assert "| How many? | 2 |" in text
    assert "| layer | workspace | time |" in text
    assert "| a | 3 MiB | 125 µs [100 µs, 150 µs], n = 6 |" in text
    assert "| b | – | – |" in text


def test_the_readme_shows_failures(tmp_path: Path) -> None:
    results.write(tmp_path, run_section(section("plans", fails_late), a_task()), NOW)

    text = results.readme(results.read(tmp_path, ["plans"]))

    assert "ValueError: the second row is missing\n```" in text


def test_long_tables_stay_in_the_files(tmp_path: Path) -> None:
    rows = [Found("a", 0)] * 131
    results.write(tmp_path, run_section(section("plans", lambda _: iter(rows)), a_task()), NOW)

    assert "131 rows: `Found` in `plans.json`." in results.readme(results.read(tmp_path, ["plans"]))


def test_a_time_of_few_samples_has_no_interval() -> None:
    timing = Timing.of(Measurement((5000, 6000, 7000)))

    assert (timing.median_us, timing.low_us, timing.high_us) == (6.0, None, None)
    assert str(timing) == "6 µs"


@pytest.mark.parametrize(
    ("microseconds", "text"), [(12.34, "12.3 µs"), (4567.0, "4.57 ms"), (2_500_000.0, "2.5 s")]
)
def test_durations_are_told_in_their_unit(microseconds: float, text: str) -> None:
    assert duration(microseconds) == text


def test_numbers_that_are_none_become_texts() -> None:
    assert jsonable((math.inf, math.nan, 1.5, None, True)) == ["inf", "nan", 1.5, None, True]


def test_a_value_without_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"A value must be a record, .* but got <class 'set'>"):
        jsonable({1})


def test_packages_come_from_the_folder_of_wheels_alone() -> None:
    command = install.pip_command(Path("build/gpu/bin/python"), ["click>=8.2"], "/wheels")

    assert command[3:] == [
        "--python",
        "build/gpu/bin/python",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--find-links",
        "/wheels",
        "click>=8.2",
    ]


def test_without_a_folder_pip_asks_its_index() -> None:
    assert "--no-index" not in install.pip_command(Path("python"), ["click"], None)


def test_only_what_is_not_there_is_installed() -> None:
    packages = {"click": "click", "no_such_module": "no-such-package"}

    assert install.missing(packages) == ["no-such-package"]


def test_what_is_there_in_another_version_is_installed() -> None:
    assert install.missing({"click": "click>=99", "pytest": "pytest>=1,<99"}) == ["click>=99"]


def test_help_is_asked_for_and_no_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit, match="0"):
        install.main(["--help"])

    assert "FOLDER" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("inside", ["", "mine"], ids=["the folder", "the file in it"])
def test_what_is_no_environment_stays(
    inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")

    with pytest.raises(SystemExit, match="2"):
        install.main([str(tmp_path / inside)])

    assert "must be an environment, which is made anew, or an empty folder" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("files", [(), ("pyvenv.cfg", "old")], ids=["empty", "an environment"])
def test_an_environment_is_made_anew(
    files: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(install, "missing", lambda _: [])

    assert install.main([str(tmp_path)]) == 0

    assert (tmp_path / "bin" / "python").exists()
    assert not (tmp_path / "old").exists()


def test_torch_is_never_among_the_packages() -> None:
    assert "torch" not in install.REQUIRED | install.OPTIONAL


@pytest.mark.parametrize(
    ("once_ms", "chosen"),
    [
        ({"own": 5, "a": 1, "b": 30, "c": 31}, ["own", "a", "b"]),  # 30 ms may be more than ten times as slow
        ({"own": 560, "a": 20, "b": 199, "c": 201}, ["own"]),  # whose rounds fill the time
        ({"own": 20, "a": 20, "b": 199, "c": 201}, ["own", "a", "b"]),
        ({"own": 20, "a": 100, "b": 150, "c": 180, "d": 190}, ["own", "a", "b", "c"]),
        ({"a": 2, "b": 1}, ["b", "a"]),
        ({}, []),
    ],
)
def test_rounds_are_for_pytorchs_own_and_for_what_ends_in_time(
    once_ms: dict[str, float], chosen: list[str]
) -> None:
    once_us = {name: 1000.0 * ms for name, ms in once_ms.items()}

    assert in_time(once_us, "own") == chosen
