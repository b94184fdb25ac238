"""What `make bench-cpu` makes of its lines: targets, tables, sums, and files; all lines here are made up."""

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.cpu import coverage, results, tables
from bench.cpu.ground import Ground
from bench.cpu.lines import (
    Case,
    Choice,
    Failed,
    GemmRate,
    Line,
    Measured,
    Recording,
    Started,
    append,
    read,
    to_text,
)
from bench.cpu.means import Pair, geometric_mean, sum_of_medians, total
from bench.cpu.settings import OF_LAYERS
from bench.cpu.summary import summary
from bench.cpu.targets import Row, rows
from mucudnn.problem import ConvOp, Layout
from tests.bench.layer_lines import (
    LAYERS,
    LIMITS,
    MIB,
    OWN,
    WINOGRAD,
    case,
    environment,
    measured,
    rounds,
)


def target(lines: Sequence[Line], *words: str) -> Row:
    """The one row of the targets in which all words occur."""
    found = [row for row in rows(Recording.of(lines), LAYERS) if all(word in row.target for word in words)]
    assert len(found) == 1
    return found[0]


FORWARD_16 = ("3x3", ", forward,", " 16 MiB, contiguous, 1 thread")


def test_a_target_is_the_geometric_mean_over_its_layers() -> None:
    lines = [measured(case("net/a"), 20.0, 10.0), measured(case("net/b"), 18.0, 16.0)]
    row = target(lines, *FORWARD_16)
    assert row.wanted == "1.40"
    assert row.found == "1.50 [1.50, 1.50] (2 layers)"
    assert row.verdict == "reached, 7.1% above"


def test_a_target_that_is_missed_says_by_how_much_and_which_layers_are_missing() -> None:
    row = target([measured(case("net/a"), 14.0, 12.5)], *FORWARD_16)
    assert row.found == "1.12 [1.12, 1.12] (1 layers)"
    assert row.verdict == "not reached, 20.0% below; 1 of 2 layers missing"


def test_layers_of_few_channels_or_other_taps_do_not_count() -> None:
    lines = [measured(case(each.name), 20.0, 10.0) for each in LAYERS[:2]]
    more = [measured(case(each.name), 20.0, 1.0) for each in LAYERS[2:]]
    assert target(lines + more, *FORWARD_16) == target(lines, *FORWARD_16)
    assert target(more, "5x5", "contiguous").found == "20.00 [20.00, 20.00] (1 layers)"


def test_a_target_without_lines_is_not_measured() -> None:
    assert target([], *FORWARD_16).verdict == "not measured"


def test_settings_do_not_mix() -> None:
    lines = [
        measured(case(setting="2-threads"), 20.0, 10.0),
        measured(case(setting="2-threads-spin"), 30.0, 10.0),
    ]
    assert target(lines, *FORWARD_16).verdict == "not measured"
    assert target(lines, "contiguous, 2 threads:").verdict == "no target; 1 of 2 layers missing"
    assert target(lines, "contiguous, 2 threads, GOMP").found == "3.00 [3.00, 3.00] (1 layers)"


def test_forward_and_backward_add_up_the_times_of_the_three_ops() -> None:
    lines = [
        measured(case(op=ConvOp.FPROP), 10.0, 5.0),
        measured(case(op=ConvOp.DGRAD), 10.0, 10.0),
        measured(case(op=ConvOp.WGRAD), 20.0, 10.0),
    ]
    row = target(lines, "3x3", "forward + backward", " 16 MiB, contiguous")
    assert row.found == "1.60 [1.60, 1.60] (1 layers)"
    two = target(lines[:2], "3x3", "forward + backward", " 16 MiB, contiguous")
    assert two.verdict == "not measured"


def test_the_best_layer_is_named() -> None:
    lines = [
        measured(case("net/a", layout=Layout.CHANNELS_LAST), 20.0, 10.0),
        measured(case("net/b", layout=Layout.CHANNELS_LAST), 23.0, 10.0),
    ]
    row = target(lines, "channels_last", "best layer")
    assert row.found == "2.30 [2.30, 2.30] (net/b)"
    assert row.verdict.startswith("reached")


def test_a_layer_whose_whole_interval_lies_below_98_percent_is_named() -> None:
    lines = [measured(case("net/a"), 9.0, 10.0), measured(case("net/b"), 9.9, 10.0)]
    row = target(lines, "every layer")
    assert row.found == "3 of 6"
    assert row.verdict.startswith(
        "not reached: 1-thread net/a contiguous fprop at 4 MiB 0.90 [0.90, 0.90]; 1-thread net/a"
    )


def test_a_layer_whose_interval_reaches_98_percent_is_no_loss() -> None:
    noisy = measured(case(), 9.0, 10.0, noise=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.2, 1.2))
    assert noisy.speedup(WINOGRAD).high == pytest.approx(1.08)
    assert target([noisy], "every layer").verdict == "reached"


def test_an_eighth_of_the_workspace_must_cost_at_most_3_percent() -> None:
    def verdict(own_ms: float, seen_bytes: int, own_bytes: int = 48 * MIB) -> str:
        line = measured(case(), own_ms, 10.0, own_bytes=own_bytes, seen_bytes=seen_bytes)
        return target([line], "hides more than 40 MiB").verdict

    assert verdict(9.8, 6 * MIB) == "reached"
    assert verdict(9.5, 6 * MIB) == "not reached: 1-thread net/a contiguous fprop: time x1.05"
    assert verdict(9.8, 7 * MIB).endswith("fprop: nothing takes so little")
    assert verdict(9.5, 7 * MIB, own_bytes=40 * MIB) == "not measured"


def test_the_rounds_that_decide_do_not_prove() -> None:
    line = measured(case(), 20.0, 10.0)
    lucky = rounds({OWN: [90.0] * 9, WINOGRAD: [10.0] * 9})
    changed = Measured(**{**vars(line), "deciding": lucky})
    assert changed.speedup(WINOGRAD).median == 2.0
    assert target([changed], *FORWARD_16).found.startswith("2.00")


# Means


def test_a_geometric_mean_of_ratios_has_an_interval_from_its_rounds() -> None:
    noisy = [9.0, 9.5, 10.0, 10.0, 10.0, 10.5, 11.0]
    found = geometric_mean([[Pair(noisy, [5.0] * 7)], [Pair([8.0] * 7, [8.0] * 7)]])
    assert found.median == pytest.approx(2**0.5)
    assert 1.8**0.5 <= found.low < found.median < found.high <= 2.2**0.5
    assert found.samples == 2


def test_the_interval_of_a_sum_covers_it_though_some_rounds_of_many_layers_are_disturbed() -> None:
    generator = np.random.default_rng(1)

    def times(*shape: int) -> NDArray[np.float64]:
        disturbed = generator.random(shape) < 0.2
        return np.exp(generator.normal(0, 0.05, shape)) * (1 + disturbed * generator.uniform(0.3, 1, shape))

    undisturbed = 27 * np.median(times(400_000))
    sums = [sum_of_medians(times(27, 10).tolist()) for _ in range(100)]

    assert sum(each.low <= undisturbed <= each.high for each in sums) >= 90


def test_a_total_weighs_layers_by_their_times() -> None:
    pairs = [Pair([10.0] * 7, [5.0] * 7), Pair([100.0] * 7, [100.0] * 7)]
    assert total(pairs).median == pytest.approx(110 / 105)
    assert total(pairs[:1]).median == 2.0


def test_the_same_rounds_give_the_same_interval() -> None:
    items = [[Pair([9.0, 9.5, 10.0, 10.5, 11.0, 12.0, 13.0], [5.0] * 7)]]
    assert geometric_mean(items) == geometric_mean(items)


# Tables


def a_recording(*lines: Line) -> Recording:
    rate = GemmRate("1-thread", 2048, (171_798_692,) * 7)  # 100 GFLOP/s
    return Recording.of([Started("1-thread", environment()), rate, *lines])


def row_of(name: str, lines: Sequence[str]) -> list[str]:
    (line,) = [each for each in lines if each.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_layer_stands_with_its_time_rates_bound_and_speedups() -> None:
    recording = a_recording(measured(case(), 18.496, 9.248, own_bytes=12 * MIB))
    cells = row_of("net/a", list(tables.layer_tables(recording, LAYERS)))
    assert cells == [
        *("net/a", "8", "18.5 [18.5, 18.5]", "100%", "12 MiB"),
        *["2.00 [2.00, 2.00]"] * 3,
        *("winograd4@2*4", "3 MiB", "9.25 [9.25, 9.25]", "200%", "400%"),
    ]


def test_beside_own_over_the_limit_stands_what_keeps_to_it() -> None:
    choices = (
        Choice(4 * MIB, OWN, None),
        Choice(16 * MIB, OWN, WINOGRAD),
        Choice(64 * MIB, OWN, OWN),
    )
    recording = a_recording(measured(case(), 8.0, 10.0, own_bytes=20 * MIB, choices=choices))
    cells = row_of("net/a", list(tables.layer_tables(recording, LAYERS)))
    assert cells[5:9] == ["own; strict: nothing fits", "own; strict: 0.80 [0.80, 0.80]", "own", "aten@8*1"]


def test_the_limit_of_one_layer_alone_has_no_column() -> None:
    own_choices = tuple(Choice(limit, OWN, OWN) for limit in (*LIMITS, 6 * MIB))
    recording = a_recording(
        measured(case("net/a"), 8.0, 10.0, choices=own_choices), measured(case("net/b"), 8.0, 10.0)
    )
    heading = next(line for line in tables.layer_tables(recording, LAYERS) if line.startswith("| layer"))
    assert [f"x at {limit} MiB" in heading for limit in (4, 6, 16, 64)] == [True, False, True, True]


def test_losses_stand_in_a_table_of_their_own() -> None:
    recording = a_recording(measured(case("net/a"), 9.0, 10.0), measured(case("net/b"), 20.0, 10.0))
    lines = list(tables.losses(recording))
    assert len(lines) == 2 + len(LIMITS)
    assert all("net/a" in line for line in lines[2:])
    assert list(tables.losses(a_recording(measured(case(), 20.0, 10.0)))) == ["None."]


def test_sums_stand_beside_geometric_means() -> None:
    recording = a_recording(measured(case("net/a"), 100.0, 100.0), measured(case("net/b"), 20.0, 5.0))
    cells = row_of("1 thread, contiguous, fprop", list(tables.sums(recording, LAYERS))[:3])
    assert cells[1:] == ["2", "4 MiB", "120 ms", "1.14 [1.14, 1.14]", "2.00 [2.00, 2.00]"]


def test_layers_without_gain_are_listed() -> None:
    own_choices = tuple(Choice(limit, OWN, OWN) for limit in LIMITS)
    recording = a_recording(
        measured(case("net/a"), 8.0, 10.0, choices=own_choices), measured(case("net/b"), 20.0, 10.0)
    )
    assert list(tables.without_gain(recording, LAYERS)) == ["* 1 thread, contiguous, fprop: 1 of 2: net/a"]


def test_what_runs_is_counted_by_how_it_gains() -> None:
    def chosen(key: str) -> tuple[Choice, ...]:
        return tuple(Choice(limit, key, key) for limit in LIMITS)

    recording = a_recording(
        measured(case("net/a"), 8.0, 10.0, choices=chosen(OWN)),
        measured(case("net/b"), 20.0, 10.0, choices=chosen("cpu:gemm@8*1")),
        measured(case("net/few"), 20.0, 10.0, choices=chosen(WINOGRAD)),
        measured(case("net/5x5"), 20.0, 10.0, choices=chosen("cpu:gemm@6*1+cpu:gemm@2*1")),
    )
    cells = row_of("1 thread, contiguous, fprop", list(tables.what_runs(recording, LAYERS))[:3])
    assert cells[1:] == ["4 MiB", "4", "1", "1", "2"]


def test_what_dividing_adds_and_how_far_predictions_lie_off_come_from_the_deciding_rounds() -> None:
    recording = a_recording(measured(case("net/a"), 20.0, 10.0))
    assert row_of("1 thread, contiguous, fprop", list(tables.dividing(recording, LAYERS)))[2] == "2.00"
    assert row_of("1 thread, contiguous, fprop", list(tables.predictions(recording, LAYERS)))[2] == "1.25"


def test_the_largest_error_of_every_algorithm_is_told() -> None:
    lines = list(tables.errors(a_recording(measured(case("net/a"), 20.0, 10.0))))
    assert row_of("winograd4", lines) == ["winograd4", "1", "2.0e-06", "1-thread net/a contiguous fprop"]


def test_layers_that_were_not_measured_are_listed_and_failures_have_their_reason() -> None:
    failed = Failed(case("net/b"), "RuntimeError: no memory.")
    lines = list(coverage.missing(a_recording(measured(case("net/a"), 20.0, 10.0), failed), LAYERS))
    assert "* 1-thread, contiguous, fprop: 2 layers: net/few, net/5x5" in lines
    assert lines[-1] == "* 1-thread net/b contiguous fprop failed: RuntimeError: no memory."
    assert any(line.endswith(": 4 layers: net/* (4)") for line in lines)


def test_where_all_is_measured_nothing_is_missing() -> None:
    cases = [each for setting in OF_LAYERS for each in all_of(setting)]
    recording = Recording.of([measured(each, 20.0, 10.0) for each in cases])
    assert list(coverage.missing(recording, LAYERS)) == ["None."]


def all_of(setting: str) -> list[Case]:
    return [Case(setting, each.name, layout, op) for each in LAYERS for layout in Layout for op in ConvOp]


# Lines and files


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    whole, later = measured(case("net/a"), 20.0, 10.0), measured(case("net/b"), 20.0, 10.0)
    append(path, whole)
    with path.open("a", encoding="utf-8") as file:
        file.write(to_text(later)[:200])
    append(path, later)
    assert read(path) == [whole, later]


def test_the_last_line_of_a_case_counts_and_a_measurement_heals_a_failure() -> None:
    lines = [
        Failed(case(), "no"),
        measured(case(), 20.0, 10.0),
        measured(case(), 30.0, 10.0),
    ]
    recording = Recording.of(lines)
    assert recording.failed == {}
    assert recording.measured[case()].speedup(WINOGRAD).median == 3.0


def test_rates_of_all_processes_of_a_setting_count() -> None:
    lines = [GemmRate("1-thread", 10, (1000,)), GemmRate("1-thread", 10, (2000,))]
    assert Recording.of(lines).rates["1-thread"] == pytest.approx((2e9, 1e9))


def test_the_summary_tells_targets_threads_and_allocator() -> None:
    text = summary(a_recording(measured(case(), 20.0, 10.0)), LAYERS, {"machine": "Some CPU"})
    assert "* machine: Some CPU" in text
    assert "\n## Targets\n" in text
    assert "* 1 thread: torch.mm 100 GFLOP/s [100, 100]" in text
    assert "* 2 threads, GOMP_SPINCOUNT=10000: not measured" in text
    assert "Allocator: that of glibc 2.36, LD_PRELOAD libjemalloc.so." in text


def test_a_summary_of_nothing_says_so() -> None:
    text = summary(Recording.of([]), LAYERS, {})
    assert "not measured" in text
    assert "The allocator is not known." in text


def test_results_are_env_lines_and_summary(tmp_path: Path) -> None:
    ground = Ground(environment(), "0123")
    lines = [Started("1-thread", environment()), measured(case("net/a"), 20.0, 10.0)]
    results.write(tmp_path, ground, lines, "python -m bench.cpu", version="0abc")
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["code"] == "0123"
    assert env["commit"] == "0abc"
    assert env["random states"] == {"operands of layers": 1, "weights and data of steps": 0}
    assert env["settings"]["1-thread"]["policy"]["threads"] == "1"
    assert read(tmp_path / "layers.jsonl") == lines
    assert (tmp_path / "summary.md").read_text().startswith("# Convolution layers on the processor")


def test_many_lines_are_compressed_in_place_of_the_plain_file(tmp_path: Path) -> None:
    ground, line = Ground(environment(), "0123"), measured(case("net/a"), 20.0, 10.0)
    results.write(tmp_path, ground, [line], "")
    results.write(tmp_path, ground, [line] * 2000, "")
    assert not (tmp_path / "layers.jsonl").exists()
    packed = gzip.decompress((tmp_path / "layers.jsonl.gz").read_bytes()).decode()
    assert packed == (to_text(line) + "\n") * 2000


def test_the_summary_needs_no_torch() -> None:
    code = "import sys, bench.cpu.summary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
