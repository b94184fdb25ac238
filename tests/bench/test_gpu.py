"""The questions to a GPU, put to a card on paper: real lists and plans, computed on the processor."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench.gpu import (
    calls,
    capture,
    contest,
    device,
    engines,
    enumeration,
    handles,
    legacy,
    memory,
    misaligned,
    overlap,
    own,
    plans,
    trials,
)
from bench.gpu.contest import CandidateRow, CaseRow, Contest
from bench.gpu.layers import LAYERS as REAL_LAYERS
from bench.gpu.layers import Case, all_cases
from bench.gpu.sections import Cut, Deadline, Section, Task, only, run_section
from bench.gpu.trials import checked_in_parts, equal_division, stand_for, whole_call
from bench.gpu.values import Answer, Timing
from mucudnn.backends.cudnn.devices import DeviceDescription, device_described
from mucudnn.backends.cudnn.library import load_library
from mucudnn.backends.cudnn.tiles import is_id as is_tiles
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.intervals import Verdict
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.paper_ground import LAYERS, PLAIN_STREAM, SMALL, PaperGround
from tests.threads import threads

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("one_thread", "few_to_collect")]


@pytest.fixture(scope="module", autouse=True)
def few_launches() -> Iterator[None]:
    """What a launch costs the host is not a matter of many on paper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "LAUNCHES", 3)
        patch.setattr(capture, "REPLAYS", 3)
        yield


@pytest.fixture
def ground() -> Iterator[PaperGround]:
    made = PaperGround(load_library())
    with made.current():
        yield made


@pytest.fixture
def task(ground: PaperGround) -> Task:
    return Task(ground, {"small": SMALL}, SMALL, {"small": SMALL}, Deadline(3600))


def candidates_of(task: Task) -> Iterator[object]:
    """The candidates in all three settings."""
    for rows in (plans.in_bfloat16, plans.in_tf32, plans.in_float32):
        yield from rows(task)


@pytest.fixture(scope="module")
def contests(few_launches: None) -> list[object]:
    """What is found of one layer, which takes some seconds."""
    ground = PaperGround(load_library())
    with threads(1), ground.current():
        return [*candidates_of(Task(ground, {"small": SMALL}, SMALL, {"small": SMALL}, Deadline(3600)))]


def late(task: Task) -> Task:
    return dataclasses.replace(task, deadline=Deadline(0))


def small(op: ConvOp = ConvOp.FPROP, dtype: str = "float32") -> ConvProblem:
    return SMALL.problem(op, dtype, Layout.CHANNELS_LAST)


def wrong_at(ground: PaperGround, beta: float) -> None:
    """Let every launch with this beta leave its result as it was."""
    execute = ground.paper._compute

    def skips(op: ConvOp, present: float, *rest: object) -> None:
        if present != beta:
            execute(op, present, *rest)

    ground.paper._compute = skips


def test_there_are_ten_layers_and_120_problems() -> None:
    cases = [*all_cases(REAL_LAYERS)]

    assert len(REAL_LAYERS) == 10
    assert len({case.problem.key for case in cases}) == 120


def test_a_setting_names_type_layout_and_precision() -> None:
    strict = dataclasses.replace(small(), layout=Layout.CONTIGUOUS)

    assert Case("small", small()).setting == "float32 NHWC"
    assert Case("small", strict, allow_tf32=False).setting == "float32 NCHW, no TF32"
    assert Case("small", small(dtype="bfloat16"), allow_tf32=False).setting == "bfloat16 NHWC"


def test_the_device_is_compared_with_the_description_of_its_name(task: Task) -> None:
    rows = [*device.rows(task)]

    assert device.Fact("SM clock", "0 MHz") in rows
    assert only(device.Compared, rows) == [device.Compared("NVIDIA H200", 24, 0)]
    assert only(device.Described, rows)[0].json == device_described("h200").text


def test_keys_that_differ_are_told_with_both_values() -> None:
    h200 = device_described("h200")
    live = DeviceDescription.from_json(h200.text.replace("1980000", "1755000"))

    assert device.differences(live, h200) == (device.Difference("smClockRateKHz", "1755000", "1980000"),)


@pytest.mark.parametrize(
    ("name", "shipped"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_shipped_description_is_found_by_the_cards_name(name: str, shipped: str) -> None:
    found = device.shipped_for(name)

    assert found is not None
    assert found.name == shipped


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA GH200 480GB", "NVIDIA RTX A1000", "NVIDIA H20"])
def test_a_card_without_a_shipped_description_has_none(name: str) -> None:
    assert device.shipped_for(name) is None


def test_what_cannot_be_described_is_told_and_goes_on(task: Task, ground: PaperGround) -> None:
    def fails() -> DeviceDescription:
        raise ValueError("no such thing")

    ground.description = fails
    rows = [*device.rows(task)]

    assert only(device.Described, rows) == [device.Described("", "no such thing")]
    assert [each.text for each in device.answers(rows)][1] == "no description: no such thing"


def test_a_description_that_cannot_be_read_is_kept_as_it_came(task: Task, ground: PaperGround) -> None:
    def fails() -> DeviceDescription:
        raise ValueError("of another kind")

    ground.told, ground.description = lambda: "{}", fails

    assert only(device.Described, device.rows(task)) == [device.Described("{}", "of another kind")]


def test_lists_by_the_same_description_are_equal_and_their_plans_run(task: Task) -> None:
    rows = only(enumeration.ListRow, enumeration.rows(task))

    assert len(rows) == 12  # ops, types, layouts
    assert all(row.is_equal and row.common == row.live == row.shipped for row in rows)
    assert all(row.common_driverless == row.driverless == row.live for row in rows)  # as here, where none is
    assert all(row.error is not None and row.error < 3e-2 for row in rows)


def test_a_process_without_a_driver_finds_none_though_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "libz.so.1").touch()
    command = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libz.so.1')"]

    found, hidden = (
        subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=False)
        for more in ({}, {"LD_LIBRARY_PATH": str(tmp_path)})
    )

    assert found.returncode == 0
    assert "file too short" in hidden.stderr


@pytest.fixture
def no_process_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at once, rather than load torch."""
    monkeypatch.setattr(sys, "executable", "/bin/false")


@pytest.mark.usefixtures("no_process_without_a_driver")
def test_a_process_without_a_driver_that_ends_leaves_its_column_empty(task: Task) -> None:
    rows = [*enumeration.rows(task)]

    assert all(row.driverless is None and row.is_equal for row in only(enumeration.ListRow, rows))
    assert not any("no driver" in answer.question for answer in enumeration.answers(rows))


@pytest.mark.usefixtures("no_process_without_a_driver")
def test_pairs_that_only_the_card_lists_are_told_with_their_notes(
    task: Task, ground: PaperGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enumeration, "shipped_for", lambda _: device_described("a100"))

    rows = [*enumeration.rows(task)]

    apart = only(enumeration.OnlyRow, rows)
    assert {(row.only_in, row.missing_in) for row in apart} == {
        ("the card", "shipped"),
        ("shipped", "the card"),
    }
    assert any("TENSOR_CORE" in row.notes for row in apart)
    lists = only(enumeration.ListRow, rows)
    assert sum(row.live - (row.common_shipped or 0) for row in lists) == sum(
        row.only_in == "the card" for row in apart
    )


@pytest.mark.usefixtures("no_process_without_a_driver")
@pytest.mark.parametrize(
    ("shipped", "text"), [("h200", "no, and the shipped one stands for it"), (None, "no")]
)
def test_where_no_description_can_be_read_the_shipped_one_stands_for_it(
    shipped: str | None, text: str, task: Task, ground: PaperGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> DeviceDescription:
        raise ValueError("of another kind")

    live = ground.enumerator()
    ground.enumerator, ground.description = lambda: live, fails
    found = None if shipped is None else device_described(shipped)
    monkeypatch.setattr(enumeration, "shipped_for", lambda _: found)

    rows = [*enumeration.rows(task)]

    question = "Can the card's own description be read?"
    assert Answer(question, text) in [*enumeration.answers(rows)]
    assert bool(only(enumeration.ListRow, rows)) == (shipped is not None)


def test_common_pairs_with_another_workspace_are_counted(ground: PaperGround) -> None:
    live = ground.enumerator().listed(small())
    other = [dataclasses.replace(live[0], overwriting_bytes=live[0].overwriting_bytes + 1), *live[2:]]

    found = enumeration.overlap(live, other)

    assert found == enumeration.Overlap(len(live) - 1, len(live) - 1, differing=1, is_equal=False)
    assert enumeration.missing(live, other) == [live[1]]


def test_every_engine_that_offers_itself_runs_once_by_its_number(task: Task, ground: PaperGround) -> None:
    rows = only(engines.EngineRow, engines.rows(task))

    first = [row for row in rows if (row.op, row.dtype, row.kernel) == ("fprop", "float32", 3)]
    numbers = [row.engine for row in first]
    assert numbers == sorted(set(numbers))
    assert {row.kernel for row in rows} == {3, 5}
    assert all(row.failure is None and row.time is not None and row.time.samples == 6 for row in rows)


def test_refused_engines_are_told_by_status(ground: PaperGround) -> None:
    problem = small()
    refused = {row.status: row.engines for row in engines.refused(ground, problem)}

    # The fused Winograd engine of fprop is for other architectures, run-time compilation needs a driver.
    assert 12 in refused[3007]
    assert {71, 72, 79} & set(refused[3008])
    offered = ground.offers(ground.graph(problem)).scanned(())
    assert sum(map(len, refused.values())) + len(offered) == 81


def test_an_engine_that_fails_is_told(ground: PaperGround) -> None:
    problem = small()
    found = engines.best_of_each_engine(ground.enumerator().listed(problem))
    stand = stand_for(ground.backend, problem, [each.id for each in found])
    broken = dataclasses.replace(found[0], engine=9999)

    row = engines._engine_row(ground, stand, broken)

    assert row.error is None
    assert row.failure is not None
    assert "cuDNN gave" in row.failure


def test_legacy_workspaces_need_a_device(task: Task) -> None:
    rows = [*legacy.rows(task)]

    asked = only(legacy.LegacyRow, rows)
    # Descriptors are made; the query itself is refused where there is no device.
    assert {row.status for row in asked} == {2000}
    assert len(asked) == 4 * (8 + 6 + 6)
    beside = only(legacy.BesideRow, rows)
    assert all(row.legacy == 0 and row.plans > 0 and row.least_bytes is not None for row in beside)


def test_a_legacy_descriptor_that_cannot_be_made_is_an_error(ground: PaperGround) -> None:
    empty = dataclasses.replace(small(), batch=0)

    with pytest.raises(legacy.LegacyError, match="cudnnSetTensorNdDescriptor must succeed, but gave"):
        legacy.LegacyLibrary(ground.library).workspace(None, empty, 0)


def test_a_captured_division_is_replayed_and_compared_in_a_buffer_in_which_nothing_eager_works(
    task: Task, ground: PaperGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[bool, set[int]] = {True: set(), False: set()}

    class Watched(Runner):
        def __call__(self, workspace: Workspace, *operands: Tensor | None) -> Tensor:
            used[ground.card.is_capturing].add(id(workspace))
            return super().__call__(workspace, *operands)

    monkeypatch.setattr(capture, "Runner", Watched)
    rows = only(capture.CaptureRow, capture.rows(task))

    assert [row.op for row in rows] == ["fprop", "fprop", "dgrad", "dgrad", "wgrad", "wgrad"] * 2
    assert [row.parts for row in rows] == [4, 8] * 6
    assert {(row.error, row.verdict, row.failure) for row in rows} == {(0.0, Verdict.SAME, None)}
    assert used[True]
    assert not used[True] & used[False]


def test_ten_divisions_in_one_graph_tell_the_time_of_the_kernels_of_one(task: Task) -> None:
    row = next(row for row in capture.rows(task) if isinstance(row, capture.CaptureRow))

    # Every span takes the same on paper: ten divisions take as long as one, and one a tenth of that.
    assert row.kernels_time.median_us == pytest.approx(row.replay_time.median_us / 10)


def test_what_parts_cost_beside_their_kernels_is_told_with_the_hosts_share() -> None:
    eager, replay, kernels = (
        Timing(us, us, us, 6, 1, converged=True, spans_ns=()) for us in (150.0, 101.0, 100.0)
    )
    row = capture.CaptureRow(
        "fprop",
        "float32",
        8,
        "cudnn:eng0",
        0.0,
        eager,
        replay,
        kernels,
        Verdict.FASTER,
        120.0,
        5.05,
        0,
        0,
        None,
    )
    slower = dataclasses.replace(row, eager_time=dataclasses.replace(eager, median_us=240.0))

    told = {each.question: each.text for each in capture.answers([row, slower])}

    assert told["What does a division of 8 parts cost beside its kernels?"] == (
        "under a graph 1.01 to 1.01 times their time, the host busy for 0.05 to 0.05 of it; "
        "part by part 1.50 to 2.40 times their time, the host busy for 0.50 to 0.80 of it"
    )


def test_parts_on_two_streams_are_compared_with_the_whole(task: Task, ground: PaperGround) -> None:
    seen: list[set[int]] = []
    on_streams = ground.on_streams

    def watched(calls: Sequence[Callable[[], None]], streams: int) -> None:
        used: set[int] = set()
        on_streams([lambda call=call: used.add(ground.card.stream()) or call() for call in calls], streams)
        seen.append(used)

    ground.on_streams = watched
    rows = only(overlap.OverlapRow, overlap.rows(task))

    assert [(row.op, row.parts) for row in rows] == [("fprop", 4), ("fprop", 8), ("dgrad", 4), ("dgrad", 8)]
    assert {row.failure for row in rows} == {None}
    assert max(row.error for row in rows) < 1e-2
    assert all(row.whole_time and row.in_turn_time and row.at_once_time for row in rows)
    assert {len(used) for used in seen} == {2}
    told = {answer.question: answer.text for answer in overlap.answers(rows)}
    assert [text.partition(" cases")[0] for text in told.values()] == ["of 2", "of 2"]


def test_a_layer_is_divided_into_every_number_of_parts_that_divides_its_batch(task: Task) -> None:
    layers = {f"of {batch}": dataclasses.replace(SMALL, batch=batch) for batch in (6, 12, 32)}

    rows = only(overlap.OverlapRow, overlap.rows(dataclasses.replace(task, layers=layers)))

    parts = [("of 12", 4), ("of 32", 4), ("of 32", 8), ("of 32", 16), ("of 32", 32)]
    assert [(row.layer, row.parts) for row in rows if row.op is ConvOp.FPROP] == parts
    assert {row.failure for row in rows} == {None}


def test_a_capture_that_fails_is_the_answer(task: Task, ground: PaperGround) -> None:
    def captured(call: object) -> None:
        raise RuntimeError("operation not permitted\nwhen the stream is capturing")

    ground.captured = captured
    rows = [*capture.rows(task)]

    assert {row.failure for row in only(capture.CaptureRow, rows)} == {"operation not permitted"}
    assert next(each.text for each in capture.answers(rows)).startswith("0 of 12 can")


def test_whole_calls_are_timed_by_all_ways_with_gradients_and_without(task: Task) -> None:
    ways = [calls.OWN, calls.WHOLE, calls.IN_PARTS, calls.NOTHING]
    passes = [calls.FORWARD, calls.BOTH, calls.SAME_THREAD]

    rows = [*calls.rows(task)]

    seen = only(calls.CallRow, rows)
    assert [row.failure for row in seen] == [None] * 24
    assert [(row.passes, row.way) for row in seen] == [*itertools.product(passes, ways)] * 2
    assert all(row.host_us is not None and row.host_us > 0 and row.time is not None for row in seen)
    asked = [each.question for each in calls.answers(rows)]
    assert asked[:2] == [
        "What does a whole call cost, forward, bfloat16 channels_last?",
        "What does a whole call cost, with gradients, bfloat16 channels_last?",
    ]
    assert next(calls.answers(rows)).text.count("until the card is done") == 4


def test_forward_passes_run_alone_and_gradients_with_them(task: Task, ground: PaperGround) -> None:
    ops: dict[str, set[str]] = {}
    found = calls.rows(task)
    for passes in (calls.FORWARD, calls.BOTH):
        ground.paper.executions.clear()
        rows = only(calls.CallRow, [*itertools.islice(found, 4)])
        assert {row.passes for row in rows} == {passes}
        ops[passes] = {each.op for each in ground.paper.executions}

    assert ops == {calls.FORWARD: {ConvOp.FPROP}, calls.BOTH: {*ConvOp}}


def test_a_call_that_cannot_be_made_is_the_answer(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr(calls.Stand, "call", fail)

    told = [each.text for each in calls.answers([*calls.rows(task)])]

    assert told == ["failed: no plan"] * 6


def test_threads_streams_and_workspaces_come_out_fine(task: Task) -> None:
    rows = [*handles.rows(task)]

    checks = [row for row in only(handles.CheckRow, rows) if not row.what.startswith("misaligned")]
    assert {row.outcome for row in checks} == {"fine"}
    assert len({row.what for row in checks}) == 4
    assert [row.number for row in only(handles.HandleRow, rows)] == [0, 1, 2, 3, 4]


def test_side_streams_are_really_used(task: Task, ground: PaperGround) -> None:
    assert [*handles.rows(task)]

    # For each of three ops in two types: one for each of two threads, and one for the side stream.
    assert {each.stream for each in ground.paper.executions} == {PLAIN_STREAM, *range(100, 118)}


@pytest.mark.parametrize("alignment", [16, 256])
def test_a_workspace_lies_at_such_a_multiple_and_no_larger_one(ground: PaperGround, alignment: int) -> None:
    problem = SMALL.problem(ConvOp.FPROP, "bfloat16", Layout.CONTIGUOUS)

    assert handles._workspace_check(ground, problem, alignment).outcome == "fine"

    workspace = ground.paper.executions[-1].workspace
    assert workspace is not None
    assert workspace % 512 == alignment


def test_an_operand_one_element_off_keeps_its_values_and_strides() -> None:
    tensor = torch.randn(2, 4, 3, 3, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)

    shifted = misaligned.one_element_off(tensor)

    assert torch.equal(shifted, tensor)
    assert shifted.stride() == tensor.stride()
    assert shifted.data_ptr() % 16 == 2


def test_a_misaligned_operand_is_launched_in_spite_of_our_own_check(ground: PaperGround) -> None:
    # The card on paper asserts the alignment that its plan was promised.
    assert misaligned.outcome(ground, small()).startswith("error: ")


def test_memory_is_looked_at_after_launches_and_plans(task: Task) -> None:
    rows = only(memory.MemoryRow, memory.rows(task))

    assert [row.moment for row in rows] == [
        "before",
        "with operands in place",
        "after the first launch",
        "after 1,000 more launches",
        "after their operands are gone",
        rows[5].moment,
        "after these plans are gone",
    ]
    assert rows[5].moment.endswith("plans of 2 layers")  # one layer in two types
    assert all(row.host_bytes > 2**20 for row in rows)


def test_growth_is_told_against_the_moment_before() -> None:
    rows = [memory.MemoryRow("before", 0, 0, 0), memory.MemoryRow("after 5 launches", 2**21, 0, 2**20)]

    assert [each.text for each in memory.answers(rows)] == [
        "after 5 launches: +2.0 MiB on the card, host +1.0 MiB"
    ]


def test_pytorchs_own_is_weighed_beside_the_first_plan(task: Task) -> None:
    rows = only(own.OwnRow, own.rows(task))

    assert len(rows) == 12
    assert {row.peak_bytes for row in rows} == {0}  # as the double of a card weighs
    assert all(row.first_bytes is not None for row in rows)


def test_every_candidate_is_right_as_a_whole_and_in_parts(contests: list[object]) -> None:
    candidates = only(CandidateRow, contests)

    assert all(row.is_right and row.time is not None and row.host_us is not None for row in candidates)
    assert {row.part_batch for row in candidates if row.is_own} == {None}
    sizes = [row.part_batch for row in candidates if not row.is_own]
    assert sizes.count(2) > sizes.count(
        None
    )  # of which there are some: not every engine computes two samples
    assert len(only(CaseRow, contests)) == 9  # three ops, three settings


def test_a_problem_of_three_dimensions_is_cut_into_single_samples(ground: PaperGround) -> None:
    problem = LAYERS["small3d"].problem(ConvOp.WGRAD, "bfloat16", Layout.CHANNELS_LAST)
    algorithm = ground.backend.algorithms(problem.part(1))[1]
    stand = stand_for(ground.backend, problem, [algorithm])

    assert checked_in_parts(stand, algorithm).error < 3e-2
    assert len(ground.paper.executions) == 2


def test_a_problem_is_summed_up_beside_pytorchs_own(contests: list[object]) -> None:
    row = only(CaseRow, contests)[0]

    # The clock on paper gives every call the same time: the first of the list is the fastest.
    assert (row.rank, row.wrong, row.ratio, row.verdict) == (0, 0, 1.0, Verdict.SAME)
    assert row.own_benchmark_time is not None
    assert row.own_time is not None
    assert row.own_time.median_us == 100
    assert row.conditions == "SM clock 0 MHz"


def test_pytorchs_flag_is_on_for_its_thread_and_what_it_was_afterwards(ground: PaperGround) -> None:
    before = torch.backends.cudnn.benchmark
    seen = []
    look = ground.card.clock
    ground.card.clock = lambda: seen.append(torch.backends.cudnn.benchmark) or look()
    stand = stand_for(ground.backend, small(), [])

    contest.by_benchmark(ground, stand)

    assert set(seen) == {True}
    assert torch.backends.cudnn.benchmark == before


def test_strict_float32_is_measured_under_its_own_rules(contests: list[object]) -> None:
    candidates = only(CandidateRow, contests)

    strict = [row for row in candidates if row.setting == "float32 NCHW, no TF32"]
    loose = [row for row in candidates if row.setting == "float32 NHWC"]
    assert strict
    assert not any("TENSOR_CORE" in row.notes for row in strict)
    assert any("TENSOR_CORE" in row.notes for row in loose)


def test_the_answers_count_what_was_found(contests: list[object]) -> None:
    told = {each.question: each.text for each in plans.answers("three settings", contests)}

    assert told["How many problems were measured in three settings?"] == (
        "9; 0 were left out, and 0 candidates of the others"
    )
    assert told["Is the fastest in three settings faster than PyTorch's own (benchmark off)?"] == (
        "FASTER 0, SLOWER 0, SAME 9, AMBIGUOUS 0"
    )
    assert told["What are Winograd's and Fourier's algorithms worth in three settings?"] == (
        "one is the fastest in 0 of 3 problems that they compute"
    )


def test_a_batch_above_2_to_the_31_elements_is_measured_beside_one_below(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert math.prod(plans.LARGE.problem(ConvOp.FPROP, "bfloat16", Layout.CONTIGUOUS).input_shape) > 2**31
    monkeypatch.setattr(plans, "LARGE", dataclasses.replace(SMALL, batch=2))

    found = only(CaseRow, plans.in_bfloat16_nchw(task))

    assert [(row.layer, row.batch) for row in found[:2]] == [("pt128936", 2), ("pt128936", 1)]
    assert {row.setting for row in found} == {"bfloat16 NCHW"}
    assert len(found) == 5


def test_filters_that_tiles_compute_are_measured_in_both_layouts(task: Task) -> None:
    found = [row for row in only(CandidateRow, plans.in_float32_by_tiles(task)) if is_tiles(row.algorithm)]

    assert {row.setting for row in found} == {"float32 NCHW, no TF32", "float32 NHWC, no TF32"}
    assert {row.op for row in found} == set(ConvOp)


def test_what_is_paid_once_for_a_mini_batch_is_timed_with_it() -> None:
    run = mock.Mock(spec=["part", "setup"])

    whole_call(run)()

    assert run.mock_calls == [mock.call.part(), mock.call.setup()]


def test_winograds_algorithm_is_a_candidate_of_strict_float32(contests: list[object]) -> None:
    found = [row for row in only(CandidateRow, contests) if row.algorithm == "cuda:winograd4"]

    assert {row.setting for row in found} == {"float32 NCHW, no TF32"}
    assert {row.op for row in found} == set(ConvOp)
    assert all(row.workspace_bytes and row.part_batch == 2 for row in found)


def test_what_winograds_algorithm_is_worth_is_told_against_the_fastest_plan(contests: list[object]) -> None:
    row, *others = [row for row in only(CaseRow, contests) if row.op == ConvOp.DGRAD]
    half = dataclasses.replace(row.fastest_time, median_us=row.fastest_time.median_us / 2)
    ahead = dataclasses.replace(row, fastest="cuda:winograd4", rank=None, fastest_time=half)
    tried = only(CandidateRow, contests)

    told = {each.question: each.text for each in plans.answers("all", [*tried, ahead, *others])}

    assert told["What are Winograd's and Fourier's algorithms worth in all?"] == (
        "one is the fastest in 1 of 3 problems that they compute; the fastest plan of cuDNN takes 2.00 times "
        "as long at most "
        "(small dgrad)"
    )


def test_a_beta_that_does_not_add_is_found_out(ground: PaperGround) -> None:
    wrong_at(ground, beta=1.0)
    problem = small(ConvOp.WGRAD)
    algorithm = ground.backend.algorithms(problem.part(2))[1]
    stand = stand_for(ground.backend, problem, [algorithm])

    assert checked_in_parts(stand, algorithm).error > 0.5


def test_a_beta_that_does_not_overwrite_is_found_out(ground: PaperGround) -> None:
    wrong_at(ground, beta=0.0)
    problem = small(ConvOp.WGRAD)
    algorithm = ground.backend.algorithms(problem.part(2))[1]
    stand = stand_for(ground.backend, problem, [algorithm])

    assert not checked_in_parts(stand, algorithm).error < 1  # NaN was there before


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_four_parts_are_run_with_the_betas_of_a_division(ground: PaperGround, op: ConvOp, dtype: str) -> None:
    problem = small(op, dtype)
    algorithm = ground.backend.algorithms(problem.part(2))[1]
    stand = stand_for(ground.backend, problem, [algorithm])

    seen = checked_in_parts(stand, algorithm)

    adds = op is ConvOp.WGRAD and dtype == "float32"
    assert [each.beta for each in ground.paper.executions] == [0.0, *[1.0 if adds else 0.0] * 3]
    assert seen.is_guard_intact
    assert seen.error <= ground.backend.error_bound(problem, algorithm)


def test_wrong_candidates_are_counted_and_never_the_fastest(task: Task, ground: PaperGround) -> None:
    wrong_at(ground, beta=0.0)

    rows = [*candidates_of(task)]

    found = only(CaseRow, rows)
    assert all(row.fastest_plan_time is None for row in found)
    assert {row.fastest for row in found} == {None, "cuda:winograd4"}  # which is none of cuDNN's plans
    tiles = [row for row in only(CandidateRow, rows) if is_tiles(row.algorithm)]
    assert all(row.is_right for row in tiles)
    assert sum(row.wrong for row in found) == sum(row.candidates for row in found) - len(tiles)


def test_an_equal_division_has_four_parts_or_as_many_as_there_are_samples() -> None:
    assert equal_division("cudnn:eng0", small()).key == "cudnn:eng0@2*4"
    assert equal_division("cudnn:eng0", small().with_batch(3)).key == "cudnn:eng0@1*3"
    assert equal_division("cudnn:eng0", small(), parts=8).key == "cudnn:eng0@1*8"


def test_problems_for_which_the_time_is_up_are_named(task: Task) -> None:
    rows = [*candidates_of(late(task))]

    assert len(rows) == 9
    assert {row.reason for row in only(plans.LeftOutRow, rows)} == {"the time was up"}


@pytest.mark.parametrize("section", [calls, enumeration, engines, legacy, capture, own])
def test_nothing_new_is_begun_when_the_time_is_up(task: Task, section: object) -> None:
    rows: Iterator[object] = section.rows(late(task))

    measured = [row for row in rows if not isinstance(row, engines.RefusedRow | engines.NotedRow)]
    assert [type(row) for row in measured] == [Cut]


def test_handles_are_asked_the_rest_when_the_time_for_threads_is_up(task: Task) -> None:
    rows = [*handles.rows(late(task))]

    assert only(Cut, rows) == [Cut("threads and streams, from fprop in bfloat16 on")]
    assert {row.what.partition(" ")[0] for row in only(handles.CheckRow, rows)} == {"misaligned", "workspace"}


def test_what_a_section_leaves_out_is_in_its_answers(task: Task) -> None:
    section = Section("own", "Memory of PyTorch's own", own.rows, own.answers, share=1)

    answers = run_section(section, late(task)).answers

    assert answers[0] == Answer(
        "Memory of PyTorch's own", "cut short for want of time: small, fprop, bfloat16 NCHW and what follows"
    )


def test_candidates_that_are_not_reached_are_neither_right_nor_wrong(ground: PaperGround) -> None:
    case = Case("small", small())

    *candidates, row = Contest(ground, case, Deadline(0)).rows()

    assert [each.algorithm for each in only(CandidateRow, candidates)] == [ground.backend.own]
    assert isinstance(row, CaseRow)
    assert (row.candidates, row.wrong, row.fastest) == (0, 0, None)
    assert row.not_reached == len(ground.backend.algorithms(case.problem)) - 1


def test_a_failure_of_whole_rounds_is_told(ground: PaperGround, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the rounds broke")

    monkeypatch.setattr(contest, "timed", fails)
    *_, row = Contest(ground, Case("small", small()), Deadline(3600)).rows()

    assert isinstance(row, CaseRow)
    assert row.failures == ("timing: the rounds broke", "benchmark: the rounds broke")


def test_what_is_noted_does_not_depend_on_the_time(task: Task) -> None:
    rows = [*engines.rows(late(task))]

    noted = only(engines.NotedRow, rows)
    assert {(row.op, row.dtype, row.kernel) for row in noted} == {
        (op, dtype, kernel) for op in ConvOp for dtype in ("float32", "float16") for kernel in (3, 5)
    }
    assert {"TENSOR_CORE", "NONDETERMINISTIC"} <= {note for row in noted for note in row.notes}
