"""Whole training steps in `make bench-cpu`: what is trained, timed and told; the networks here are small."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.by_hand import a_plan_for
from bench.commit import commit
from bench.cpu import case_run, products, program, step_again, step_tables, steps
from bench.cpu.case_run import CaseRun, steps_in
from bench.cpu.ground import step_code
from bench.cpu.lines import Line, Recording, append, read, to_text
from bench.cpu.process import task_from, task_text
from bench.cpu.rounds import Rounds
from bench.cpu.settings import REMOVED_PREFIXES, SETTINGS
from bench.cpu.step_again import TIMEOUT_S, AgainTask, rounds_again
from bench.cpu.step_cases import AIMS, LIMIT_BYTES, NETWORKS, Network, cases_of
from bench.cpu.step_child import LINES, StepTask, work
from bench.cpu.step_lines import (
    DIVIDED,
    OWN,
    UNDIVIDED,
    SiteTime,
    StepCase,
    StepFailed,
)
from bench.cpu.step_models import ReadingStep, mosaics_of, prepared, stacks_of, unet_on_mosaics
from bench.cpu.step_rounds import timed
from bench.cpu.steps import measure
from bench.differences import Differences
from mucudnn import Plan, plan_of
from mucudnn.backends.base import NoNeighbours
from mucudnn.errors import InfeasibleError, PlanError
from mucudnn.intervals import Verdict
from mucudnn.problem import ConvOp, Layout
from mucudnn.timing import SamplingRule
from tests.bench.recipes import HERE, TINY
from tests.bench.step_lines import case, measured

# What is small is faster on one thread, and a process's work would set their number for the tests to come.
pytestmark = pytest.mark.usefixtures("one_thread")

StepRun = CaseRun[StepCase, StepTask]


# What is trained


def test_the_cases_are_every_network_in_every_setting_and_layout_network_by_network() -> None:
    cases = cases_of(NETWORKS, tuple(SETTINGS), tuple(Layout))
    assert len(cases) == len(set(cases)) == 9 * 7 * 2
    names = (
        *("resnet18", "vgg11", "unet", "unet3d", "resnet18-224", "resnet50"),
        *("mobilenetv2", "efficientnet-b0", "convnext-t"),
    )
    assert [each.network for each in cases] == [name for name in names for _ in range(14)]
    assert cases[0] == case()


def test_only_the_settings_and_layouts_asked_for_are_cases() -> None:
    assert cases_of([TINY], ("2-threads",), (Layout.CONTIGUOUS,)) == [
        case("tiny", "2-threads", Layout.CONTIGUOUS)
    ]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_every_network_scores_its_data_and_learns_from_them(network: Network) -> None:
    step = prepared(network.recipe, Layout.CHANNELS_LAST)
    images, targets = step.read()
    assert len(images) == len(targets) == step.batch
    step.train(images[:2], targets[:2])
    assert 0 < step.loss < 20
    assert all(weight.grad is not None for weight in step.model.parameters())
    normalising = nn.BatchNorm2d | nn.BatchNorm3d | nn.LayerNorm
    assert any(isinstance(layer, normalising) for layer in step.model.modules())


def test_a_mosaic_has_sixteen_images_row_by_row_and_what_is_left_over_is_left_out() -> None:
    images = torch.arange(33.0).reshape(33, 1, 1, 1).expand(33, 3, 32, 32)
    mosaics = mosaics_of(images)
    assert mosaics.shape == (2, 1, 128, 128)
    assert mosaics[1, 0, ::32, ::32].tolist() == [
        [16, 17, 18, 19],
        [20, 21, 22, 23],
        [24, 25, 26, 27],
        [28, 29, 30, 31],
    ]
    assert torch.equal(mosaics[0, 0, :32, 32:64], images[1, 0])


def test_a_stack_has_an_image_in_each_slice_and_what_is_left_over_is_left_out() -> None:
    images = torch.arange(70.0).reshape(70, 1, 1, 1).expand(70, 3, 32, 32)
    stacks = stacks_of(images)
    assert stacks.shape == (2, 1, 32, 32, 32)
    assert stacks[:, 0, :, 5, 7].tolist() == [list(range(32)), list(range(32, 64))]


def test_volumes_and_filters_have_the_layout_asked_for() -> None:
    step = prepared("bench.cpu.step_models:unet3d_on_stacks", Layout.CHANNELS_LAST)
    volumes, targets = step.read()
    assert volumes.shape == (2, 1, 32, 32, 32)
    assert targets.shape == (2, 32, 32, 32)
    filters = [each for each in step.model.parameters() if each.dim() == 5]
    assert all(each.is_contiguous(memory_format=torch.channels_last_3d) for each in (volumes, *filters))


def test_ink_and_paper_of_the_mosaics_are_told_apart_pixel_by_pixel() -> None:
    recipe = unet_on_mosaics()
    assert recipe.images.shape == (93, 1, 128, 128)
    assert recipe.targets.shape == (93, 128, 128)
    assert 0.2 < recipe.targets.float().mean() < 0.5
    ink = recipe.images.squeeze(1)
    assert ink[recipe.targets == 1].min() > ink[recipe.targets == 0].max()


@pytest.mark.parametrize("layout", Layout)
def test_copies_of_a_step_read_the_same_batches_and_take_the_same_way(layout: Layout) -> None:
    one = prepared(TINY.recipe, layout)
    other = one.copy()
    for _ in range(5):
        one()
        other()
        assert one.loss == other.loss
    assert one.model is not other.model


def test_images_have_the_layout_asked_for_and_every_pass_an_order_of_its_own() -> None:
    step = prepared(TINY.recipe, Layout.CHANNELS_LAST)
    batches = [step.read() for _ in range(12)]
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images, _ in batches)
    first, second = (torch.cat([images for images, _ in some]) for some in (batches[:6], batches[6:]))
    assert not torch.equal(first, second)
    assert torch.equal(first.sum(dim=(1, 2, 3)).sort().values, second.sum(dim=(1, 2, 3)).sort().values)


def test_a_step_changes_the_weights() -> None:
    step = prepared(TINY.recipe, Layout.CONTIGUOUS)
    before = [weight.clone() for weight in step.model.parameters()]
    step()
    assert not any(torch.equal(*pair) for pair in zip(before, step.model.parameters(), strict=True))


# What is measured


def test_a_step_in_16_bits_is_tuned_and_trained_in_them(tmp_path: Path) -> None:
    line = measure(case("tiny", "2-threads-bf16"), TINY, tmp_path, processes=1)
    (path,) = tmp_path.glob("*.json")
    assert {each.problem.dtype for each in Plan.load(path).assignments} == {"bfloat16"}
    assert line.limit_bytes == 64 * 2**20
    assert line.differences is not None
    assert line.rounding is not None
    assert line.differences.outputs < 0.05
    assert 1e-4 < line.rounding.outputs < 0.05
    assert line.own_bytes is not None


def test_a_small_step_is_measured_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(REMOVED_PREFIXES)]:
        monkeypatch.delenv(name)  # as in a process of the run
    line = measure(case("tiny"), TINY, tmp_path, processes=2)
    assert len(line.rounds.samples_s(OWN)) == len(line.rounds.samples_s(DIVIDED)) >= 15
    (again,) = line.again
    assert len(again.samples_s(OWN)) == len(again.samples_s(DIVIDED)) >= 15
    assert again.spans_ns != line.rounds.spans_ns
    assert line.tuned.known == 0
    assert line.tuned.trials > 0
    assert len(line.tuned.runs) == 5  # three ops of one convolution; the first one has no dgrad
    assert 0 < line.convolutions < 1
    assert 0 < line.reading < 1
    assert line.difference < 1e-4
    assert line.differences.outputs == line.difference
    assert max(line.differences.gradients, line.differences.statistics) < 1e-3
    assert 0 < line.rounding.outputs < 1e-4
    assert {each.place for each in line.tuned.times} == {"0.conv", "2.conv"}
    assert all(min(each.own_s, each.now_s) > 0 for each in line.tuned.times)
    assert min(line.own_bytes, line.divided_bytes) >= 2 * 8 * 64**2 * 4  # the activations of one convolution
    plan = Plan.load(tmp_path / "1-thread_tiny_channels_last.patched.json")
    assert {str(site): division.key for site, division in plan.sites.items()} == line.tuned.runs
    append(tmp_path / LINES, line)
    assert read(tmp_path / LINES) == [line]


def tiny_step_of_four() -> tuple[ReadingStep, torch.Tensor]:
    step = prepared(TINY.recipe, Layout.CHANNELS_LAST)
    return step, torch.cat([step.read()[0] for _ in range(2)]).to(memory_format=torch.channels_last)


def test_a_plan_without_micro_batches_is_made_where_there_are_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, sample = tiny_step_of_four()
    divided = dataclasses.replace(a_plan_for(step.model, sample), limit_bytes=LIMIT_BYTES)
    assert not any(each.division.is_undivided for each in divided.assignments)
    found = steps._undivided(step.model, sample, tmp_path / "tiny", divided)
    (undivided,) = found.values()
    assert [*found] == [UNDIVIDED]
    assert undivided == Plan.load(tmp_path / "tiny.undivided.json")
    assert undivided.limit_bytes == LIMIT_BYTES
    assert all(each.division.is_undivided for each in undivided.assignments)
    assert steps._undivided(step.model, sample, tmp_path / "tiny", undivided) == {}
    assert capsys.readouterr().out == ""


def test_where_no_whole_batch_fits_the_step_without_micro_batches_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, policy: str, **__: object) -> Plan:
        raise InfeasibleError(16, 32, site=policy)

    step, sample = tiny_step_of_four()
    monkeypatch.setattr(steps, "tune", refused)
    assert steps._undivided(step.model, sample, tmp_path / "tiny", a_plan_for(step.model, sample)) == {}
    assert capsys.readouterr().out == f"not timed undivided: {InfeasibleError(16, 32, site='undivided')}\n"


def test_a_process_that_fails_to_time_the_steps_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = AgainTask(
        case("tiny"), TINY, {DIVIDED: str(tmp_path / "none.json")}, patches_first=True,
        rounds=str(tmp_path / "rounds"),
    )  # fmt: skip
    assert rounds_again(task) is None
    told = capfd.readouterr()
    assert told.out == "not timed in another process: its process ended with status 1.\n"
    assert "none.json" in told.err


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    network, told = Network("waiting", f"{HERE}:waiting", "made up", "nothing"), tmp_path / "process"
    task = AgainTask(case("waiting"), network, {}, patches_first=False, rounds=str(tmp_path / "rounds.json"))
    program = "import sys; from bench.cpu.process import task_from; from bench.cpu.step_again import *; "
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{program} rounds_again(task_from(AgainTask, sys.stdin.read()))"],
        stdin=subprocess.PIPE,
        env={**os.environ, "MUCUDNN_TEST_PROCESS": str(told)},
        text=True,
    )
    parent.stdin.write(task_text(task))
    parent.stdin.close()
    child = until(lambda: told.exists() and told.read_text(encoding="utf-8"))
    parent.kill()
    parent.wait()
    assert until(lambda: not _is_running(child))


def until(found: Callable[[], Any]) -> Any:
    """What is found within a minute."""
    end = time.monotonic() + 60
    while not (seen := found()) and time.monotonic() < end:
        time.sleep(0.05)
    return seen


def _is_running(process: str) -> bool:
    """Whether a process is there, and is no zombie that nobody has waited for."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("patches_first", [False, True])
def test_patched_models_are_made_before_the_unpatched_one_or_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patches_first: bool
) -> None:
    first = prepared(TINY.recipe, Layout.CHANNELS_LAST)
    plan = a_plan_for(first.model, first.copy().read()[0])
    plans = {DIVIDED: plan, UNDIVIDED: dataclasses.replace(plan, limit_bytes=2 * plan.limit_bytes)}
    files = {name: tmp_path / f"{name}.json" for name in plans}
    for name, plan in plans.items():
        plan.save(files[name])
    monkeypatch.setattr(step_again, "prepared", lambda *_: first)
    texts = {name: str(path) for name, path in files.items()}
    found = step_again.models(AgainTask(case("tiny"), TINY, texts, patches_first, rounds=""))
    assert [*found] == [OWN, DIVIDED, UNDIVIDED]
    assert found[UNDIVIDED if patches_first else OWN] is first
    assert {name: plan_of(found[name].model) for name in plans} == plans
    with pytest.raises(PlanError):
        plan_of(found[OWN].model)


def test_a_process_that_fails_costs_no_rounds_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = measured(case()).rounds
    answers = iter([None, rounds])
    seen: list[AgainTask] = []

    def again(task: AgainTask) -> Rounds | None:
        seen.append(task)
        return next(answers)

    monkeypatch.setattr(steps, "rounds_again", again)
    plans = {DIVIDED: "plan.json"}
    assert steps._again(case("tiny"), TINY, plans, tmp_path / "answer", 3) == (rounds,)
    assert [task.patches_first for task in seen] == [True, False]
    assert all(task.plans == plans for task in seen)


def test_others_are_watched_while_steps_are_timed() -> None:
    seen: list[str] = []

    class Watching(NoNeighbours):
        taken = 0.25

        @contextlib.contextmanager
        def watched(self) -> Iterator[None]:
            seen.append("watch")
            yield
            seen.append("done")

    rounds = Rounds.timed({OWN: lambda: seen.append("step")}, SamplingRule((2,), 1.0), Watching())
    assert rounds.others == 0.25
    assert (seen[0], seen[-1]) == ("watch", "done")
    assert {*seen[1:-1]} == {"step"}


def test_a_step_whose_loss_is_no_number_is_no_measurement() -> None:
    own = prepared(f"{HERE}:diverging", Layout.CONTIGUOUS)
    with pytest.raises(ValueError, match=r"^The loss of the unpatched model must be finite, but got nan"):
        timed({OWN: own}, NoNeighbours())


def test_a_task_survives_its_text_and_its_process_writes_what_it_is_and_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_SIZE", 64)
    broken = Network("broken", f"{HERE}:mistaken", "made up", "nothing")
    task = StepTask(case("broken"), broken, str(tmp_path), processes=1)
    assert task_from(StepTask, task_text(task)) == task
    work(task)
    recording = Recording.of(read(tmp_path / LINES))
    assert recording.started["1-thread"].environment.policy["threads"] == "1"
    assert len(recording.rates["1-thread"]) >= 6
    assert recording.failed_steps[case("broken")].reason.startswith("SampleError: ")


def test_the_time_saved_is_weighed_against_tuning() -> None:
    line = measured(case(), 2500.0, 2000.0)
    assert line.speedup.median == 1.25
    assert line.verdict is Verdict.FASTER
    assert (line.break_even.low, line.break_even.median, line.break_even.high) == pytest.approx((200,) * 3)


def test_steps_to_break_even_have_an_interval_and_never_come_if_nothing_is_saved() -> None:
    noise = (0.9,) * 5 + (1.0,) * 5 + (1.1,) * 5
    line = measured(case(), 2500.0, 2000.0, noise)
    assert line.break_even.low == pytest.approx(100 / 0.7)
    assert line.break_even.high == pytest.approx(100 / 0.3)
    loss = measured(case(), 2500.0, 2400.0, noise)
    assert loss.break_even.median == pytest.approx(1000)
    assert loss.break_even.high == float("inf")
    assert measured(case(), 2500.0, 2600.0).break_even.median == float("inf")


# A run


def run_of(folder: Path, lines: Sequence[Line], seen: list[StepTask], how: str | None = None) -> StepRun:
    """A run whose process writes the next of `lines`."""
    left = iter(lines)

    def process(task: StepTask, _: float) -> str | None:
        seen.append(task)
        for line in left:
            append(folder / LINES, line)
            break
        return how

    return CaseRun(steps_in(5), folder, [TINY], process)


CASES = cases_of([TINY], ("1-thread",), tuple(Layout))


def test_a_run_measures_every_case_once_and_the_next_run_none(tmp_path: Path) -> None:
    seen: list[StepTask] = []
    run_of(tmp_path, [measured(each) for each in CASES], seen).measure(CASES, 3600)
    assert [task.case for task in seen] == CASES
    assert all(task.network == TINY for task in seen)
    run_of(tmp_path, [], seen).measure(CASES, 3600)
    assert len(seen) == 2


def test_what_failed_is_tried_again_by_the_next_run_and_the_others_are_measured(tmp_path: Path) -> None:
    first, second = CASES
    seen: list[StepTask] = []
    run = run_of(tmp_path, [StepFailed(first, "no"), measured(second)], seen)
    run.measure(CASES, 3600)
    run_of(tmp_path, [measured(first)], seen).measure(CASES, 3600)
    assert [task.case for task in seen] == [first, second, first]
    assert Recording.of(run.lines()).failed_steps == {}


def test_a_case_in_which_the_process_dies_has_failed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "new", [], [], "its process ended with status -11.")
    run.measure(CASES[:1], 3600)
    assert run.lines() == [StepFailed(CASES[0], "its process ended with status -11.")]


def test_what_was_written_before_the_process_died_counts(tmp_path: Path) -> None:
    run = run_of(tmp_path, [measured(CASES[0])], [], "its process ended with status -11.")
    run.measure(CASES[:1], 3600)
    assert run.lines() == [measured(CASES[0])]


def test_without_time_nothing_is_started(tmp_path: Path) -> None:
    seen: list[StepTask] = []
    run_of(tmp_path, [], seen).measure(CASES, 0)
    assert seen == []


# What is told


def row_of(words: Sequence[str], lines: Sequence[str]) -> list[list[str]]:
    """The cells of the rows that begin with these words."""
    start = "| " + " | ".join(words) + " |"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith(start)]


def shown(*lines: Line) -> list[str]:
    return list(step_tables.section(Recording.of(lines), ()))


def test_absolute_times_stand_first_and_shares_memory_and_tuning_follow() -> None:
    text = shown(measured(case()))
    times, _, parts, changes, tuning = row_of(("resnet18", "channels_last", "1 thread"), text)
    assert times[3:] == [
        "64",
        "16 MiB",
        "2500 [2500, 2500]",
        "1250 [1250, 1250]",
        "2.00 [2.00, 2.00]",
        "FASTER",
        "1.35",
        "15 rounds",
        "–",
        "–",
    ]
    assert parts[3:] == ["80%", "5.00", "0.1%", "3 GiB", "1 GiB", "12 MiB", "1 of 2"]
    assert changes[3:] == ["3.0e-06", "–", "–"]  # of an older version
    assert tuning[3:] == ["100 s", "300", "256 MiB", "80 [80, 80]"]


def test_a_loss_stands_as_plainly_as_a_gain() -> None:
    times, *_, tuning = row_of(
        ("vgg11", "contiguous", "2 threads"),
        shown(measured(case("vgg11", "2-threads", Layout.CONTIGUOUS), 600.0, 750.0)),
    )
    assert times[5:10] == ["600 [600, 600]", "750 [750, 750]", "0.80 [0.80, 0.80]", "SLOWER", "–"]
    assert tuning[-1] == "∞ [∞, ∞]"


def in_others(*now_ms: float, others: float | None = None) -> tuple[Rounds, ...]:
    """The rounds of further processes, in which an unpatched step takes 2500 ms."""
    return tuple(measured(case(), 2500.0, each, others=others).rounds for each in now_ms)


def test_few_processes_stand_beside_the_intervals_of_the_one_that_tuned() -> None:
    again = in_others(1250.0, 1000.0, 200.0, 2000.0, others=0.5)
    line = measured(case(), 2500.0, 1250.0, others=0.25, again=again)
    times, *_ = row_of(("resnet18", "channels_last", "1 thread"), shown(line))
    assert times[7] == "2.00 [2.00, 2.00]"
    assert times[10:] == ["15 rounds", "2.00; 1.25, 2.00, 2.50, 12.50", "0.25"]
    assert "FASTER (by process 2.00; 1.25, 2.00, 2.50, 12.50), tuned in" in step_tables.told(line)


def test_of_six_processes_each_is_a_sample() -> None:
    again = in_others(1250.0, 1000.0, 2000.0, 1000.0, 1250.0, others=0.5)
    line = measured(case(), 2500.0, 1250.0, others=0.25, again=again)
    times, *_, tuning = row_of(("resnet18", "channels_last", "1 thread"), shown(line))
    assert times[5:] == [
        "2500 [2500, 2500]",
        "1250 [1000, 2000]",
        "2.00 [1.25, 2.50]",
        "FASTER",
        "1.35",
        "6 processes",
        "2.00; 1.25, 2.00, 2.00, 2.50, 2.50",
        "0.50",
    ]
    assert tuning[-1] == "80 [67, 200]"


def test_what_dividing_adds_has_a_row_where_anything_is_divided() -> None:
    where = ("resnet18", "channels_last", "1 thread")
    _, dividing, *_ = row_of(where, shown(measured(case(), 2500.0, 1250.0, undivided_ms=1500.0)))
    assert dividing[3:] == ["1 of 2", "1500 [1500, 1500]", "1250 [1250, 1250]", "1.20 [1.20, 1.20]", "FASTER"]
    _, dividing, *_ = row_of(where, shown(measured(case())))
    assert dividing[3:] == ["0 of 2", "–", "1250 [1250, 1250]", "–", "–"]


def test_what_dividing_adds_is_of_processes_where_there_are_enough() -> None:
    again = tuple(
        measured(case(), 2500.0, 1250.0, undivided_ms=each).rounds
        for each in (1000.0, 1250.0, 1500.0, 1250.0, 2500.0)
    )
    line = measured(case(), 2500.0, 1250.0, undivided_ms=1250.0, again=again)
    _, dividing, *_ = row_of(("resnet18", "channels_last", "1 thread"), shown(line))
    assert dividing[4:] == ["1250 [1000, 2500]", "1250 [1250, 1250]", "1.00 [0.80, 2.00]", "AMBIGUOUS"]


def test_of_rounds_too_few_for_an_interval_there_is_no_verdict() -> None:
    assert measured(case(), 2500.0, 1250.0, noise=(1.0,) * 5).verdict is Verdict.AMBIGUOUS


def test_a_gain_that_one_of_six_processes_does_not_see_is_no_gain() -> None:
    line = measured(case(), 2500.0, 1250.0, again=in_others(1250.0, 1250.0, 1250.0, 1250.0, 2500.0))
    assert line.verdict is Verdict.AMBIGUOUS
    assert line.break_even.high == float("inf")


def test_what_others_took_and_what_changed_stand_beside_the_times() -> None:
    changes = {"differences": Differences(1e-6, 2e-4, 3e-7), "rounding": Differences(4e-6, 5e-4, 6e-7)}
    times, _, _, changed, _ = row_of(
        ("resnet18", "channels_last", "1 thread"), shown(measured(case(), others=0.125, **changes))
    )
    assert times[-1] == "0.12"
    assert changed[3:] == ["1.0e-06 (4.0e-06)", "2.0e-04 (5.0e-04)", "3.0e-07 (6.0e-07)"]


def test_each_convolution_s_gain_stands_beside_its_share_of_the_step() -> None:
    fprop, wgrad = ConvOp.FPROP, ConvOp.WGRAD
    times = (
        SiteTime("stem", fprop, 0.25, 0.125),
        SiteTime("up", fprop, None, 0.5),
        SiteTime("stem", wgrad, 0.25, 0.25),
    )
    lines = list(step_tables.shares(Recording.of([measured(case(), times=times)]), ()))
    assert "resnet18, channels_last, 1 thread:" in lines
    assert "| stem | 20.0% | 30.0% | 1.33 |" in lines
    assert "| up | – | 40.0% | – |" in lines
    assert lines[-2:] == ["| these 1 together | 20.0% | 30.0% | 1.33 |", "| the other 1 | – | 40.0% | – |"]
    (only,) = step_tables.shares(Recording.of([measured(case())]), ())
    assert only == "Not kept by the version that measured."


def test_tuning_that_was_interrupted_took_at_least_what_the_last_run_took() -> None:
    *_, tuning = row_of(("resnet18", "channels_last", "1 thread"), shown(measured(case(), known=200)))
    assert tuning[3:] == ["at least 100 s", "500", "256 MiB", "at least 80 [80, 80]"]


def test_what_could_not_be_weighed_is_left_blank() -> None:
    _, _, parts, *_ = row_of(
        ("resnet18", "channels_last", "1 thread"), shown(measured(case(), own_bytes=None))
    )
    assert parts[6:8] == ["–", "1 GiB"]


def test_what_was_not_measured_what_failed_and_what_cannot_be_tuned_is_listed() -> None:
    text = "\n".join(
        shown(
            measured(case(), untouched=("up: transposed",)),
            measured(case(setting="2-threads"), untouched=("up: transposed",)),
            StepFailed(case("unet"), "RuntimeError: no memory."),
        )
    )
    assert "* 1-thread unet channels_last failed: RuntimeError: no memory." in text
    assert text.count("* resnet18 leaves untouched: up: transposed") == 1
    assert (
        "* resnet18 was not measured with 1-thread contiguous, 2-threads contiguous, 2-threads-spin" in text
    )
    assert "* unet was not measured with 1-thread contiguous, 2-threads channels_last" in text
    assert all(f"* {network.name}: {network.source}" in text for network in NETWORKS)


def test_of_nothing_only_the_networks_and_what_is_missing_are_told() -> None:
    assert len(shown()) == 2 * len(NETWORKS)


def targets(*lines: Line) -> list[tuple[str, ...]]:
    return [tuple(row) for row in step_tables.target_rows(Recording.of(lines))]


def test_targets_hold_for_resnet18_in_both_layouts_on_one_thread_and_two() -> None:
    assert {(aim.case.setting, str(aim.case.layout), aim.wanted) for aim in AIMS} == {
        (setting, layout, wanted)
        for setting in ("1-thread", "2-threads", "2-threads-spin")
        for layout, wanted in (("channels_last", 1.35), ("contiguous", 1.25))
    }
    assert {aim.case.network for aim in AIMS} == {"resnet18"}


def test_a_target_says_whether_it_is_reached_and_by_how_much() -> None:
    first, second, *_ = targets(measured(case()), measured(case(setting="2-threads"), 2500.0, 2000.0))
    assert first == (
        "training step of resnet18, 16 MiB, channels_last, 1 thread",
        "1.35",
        "2.00 [2.00, 2.00] (FASTER)",
        "reached, 48.1% above",
    )
    assert second[2:] == ("1.25 [1.25, 1.25] (FASTER)", "not reached, 7.4% below")


def test_targets_without_lines_are_not_measured() -> None:
    assert {row[3] for row in targets()} == {"not measured"}


def test_a_step_that_is_proven_slower_is_named() -> None:
    *_, last = targets(measured(case("vgg11"), 100.0, 110.0), measured(case("unet")))
    assert last[2:] == ("1 of 2", "not reached: 1-thread vgg11 channels_last 0.91 [0.91, 0.91]")


def test_progress_tells_times_verdict_and_tuning() -> None:
    assert step_tables.told(measured(case())) == (
        "2500 [2500, 2500] ms -> 1250 [1250, 1250] ms, x2.00 [2.00, 2.00] FASTER, tuned in 100 s  (400 s)"
    )
    assert step_tables.told(StepFailed(case(), "no")) == "failed: no"


# The program


def test_the_program_writes_the_steps_that_it_knows_beside_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert program.main(["--seconds", "0", "--output", "first"]) == 1
    (folder,) = (tmp_path / "build" / "bench-cpu").iterdir()
    steps = folder / f"steps-{step_code()}"
    steps.mkdir()
    append(steps / LINES, measured(case()))
    assert program.main(["--steps", "--seconds", "0", "--output", "second"]) == 0
    assert (tmp_path / "second" / "steps.jsonl").read_text() == to_text(measured(case())) + "\n"
    assert (tmp_path / "second" / "layers.jsonl").read_text() == ""
    assert (
        "| resnet18 | channels_last | 1 thread | 64 | 16 MiB | 2500"
        in (tmp_path / "second" / "summary.md").read_text()
    )
    assert json.loads((tmp_path / "second" / "env.json").read_text())["step code"] == step_code()
    assert json.loads((tmp_path / "second" / "env.json").read_text())["commit"] == commit()
    assert "reached, 48.1% above" in capsys.readouterr().out


def test_a_step_is_timed_in_as_many_processes_as_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[StepTask, float]] = []

    def ended(_module: str, task: StepTask, _setting: str, timeout_s: float) -> None:
        seen.append((task, timeout_s))

    monkeypatch.setattr(case_run, "ended", ended)
    monkeypatch.chdir(tmp_path)
    steps = ("--steps", "vgg11", "--settings", "1-thread", "--layouts", "contiguous", "--seconds", "100")
    for more in ((), ("--processes", "1"), ("--processes", "3")):
        program.main([*steps, *more, "--output", "out"])

    assert [task.processes for task, _ in seen] == [6, 1, 3]
    assert seen[2][1] - seen[1][1] == pytest.approx(2 * TIMEOUT_S, abs=10)


@pytest.mark.parametrize(
    ("arguments", "aside"),
    [
        ([], {"layers", "steps"}),
        (["--steps"], {"steps"}),
        (["--layers", "vgg16/*"], {"layers"}),
    ],
)
def test_only_what_is_measured_anew_is_set_aside(
    arguments: list[str], aside: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program.main(["--seconds", "0", "--output", "out"])
    (folder,) = (tmp_path / "build" / "bench-cpu").iterdir()
    (folder / "layers.jsonl").touch()
    (folder / f"steps-{step_code()}").mkdir()
    program.main([*arguments, "--again", "--seconds", "0", "--output", "out"])
    renamed = {path.name.partition("-")[0] for path in folder.iterdir() if "-until-" in path.name}
    assert renamed == aside
    assert len(list(folder.iterdir())) == 2


ALL_NETWORKS = {network.name for network in NETWORKS}


@pytest.mark.parametrize(
    ("arguments", "networks", "layers"),
    [
        ([], ALL_NETWORKS, True),
        (["--steps"], ALL_NETWORKS, False),
        (["--steps", "vgg11"], {"vgg11"}, False),
        (["--layers", "vgg16/*"], set(), True),
        (["--ops", "fprop"], set(), True),
    ],
)
def test_steps_follow_the_layers_unless_either_is_asked_for_alone(
    arguments: list[str],
    networks: set[str],
    layers: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: set[str] = set()
    selected: list[object] = []
    monkeypatch.setattr(program.Run, "measure", lambda _, selection: selected.append(selection))
    monkeypatch.setattr(
        program.CaseRun, "measure", lambda _, cases, __: asked.update(each.network for each in cases)
    )
    assert program.main([*arguments, "--settings", "1-thread", "--output", "out"]) == 1
    assert asked == networks
    assert bool(selected) is layers
