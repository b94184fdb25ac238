"""What `make gpu-layers` makes of its lines; all lines here are made up."""

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cpu.lines import (
    BENCHMARK,
    Choice,
    Failed,
    Line,
    Measured,
    Recording,
    Rounds,
    write_lines,
)
from bench.gpu import layer_run, layer_tables
from bench.gpu.layer_kinds import IN_PARTS, UNDIVIDED
from bench.gpu.layer_means import Unpaired, compared, workspace_saving
from bench.gpu.layer_summary import retell, summary
from tests.bench.gpu_layer_lines import (
    FIRST,
    HALVES,
    LIMITS,
    MIB,
    OWN,
    PARTS,
    SECOND,
    WHOLE,
    case,
    measured,
    started,
)

TILES = "cuda:winograd4@2*4"


def table(lines: Iterator[str]) -> list[list[str]]:
    """The cells of a table's rows, its headings left out."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]


def of(*lines: Line) -> Recording:
    return Recording.of(lines)


def test_sums_are_of_medians_of_all_ways_over_the_same_cases() -> None:
    rows = table(layer_tables.sums(of(FIRST, SECOND), ""))
    assert rows == [
        ["float32-nchw", limit, "2", "0", "18 [18, 18]", "12 [12, 12]", "13 [13, 13]", "12 [12, 12]"]
        for limit in ("8 MiB", "64 MiB")
    ]
    (small, _) = table(layer_tables.sums(of(FIRST, SECOND), "deepbench/"))
    assert small == ["float32-nchw", "8 MiB", "1", "0", "8 [8, 8]", "6 [6, 6]", "4 [4, 4]", "2 [2, 2]"]


def test_gains_against_each_base_are_a_quotient_of_sums_a_geometric_mean_and_the_largest() -> None:
    rows = table(layer_tables.gains(of(FIRST, SECOND), ""))
    assert [row[2:] for row in rows[:3]] == [
        ["the undivided best in the same limit", "2", "0", "1.08 [1.08, 1.08]", "1.34 [1.34, 1.34]",
         "2.00 [2.00, 2.00]",
         "float32-nchw deepbench/a contiguous fprop", "1", "1"],
        ["PyTorch as it comes", "2", "0", "1.50 [1.50, 1.50]", "2.00 [2.00, 2.00]", "4.00 [4.00, 4.00]",
         "float32-nchw deepbench/a contiguous fprop", "1", "0"],
        ["PyTorch with `cudnn.benchmark`", "2", "0", "1.00 [1.00, 1.00]", "1.34 [1.34, 1.34]",
         "3.00 [3.00, 3.00]",
         "float32-nchw deepbench/a contiguous fprop", "1", "1"],
    ]  # fmt: skip


def test_own_as_it_comes_is_judged_beside_benchmark_by_intervals_and_left_out_of_pairs() -> None:
    line = measured(case("deepbench/c"), {OWN: 3.0, WHOLE: 4.0}, {BENCHMARK: 2.0}, key=OWN)
    found = compared(line, LIMITS[0])
    assert found is not None
    assert isinstance(found.benchmark, Unpaired)
    assert found.benchmark.quotient.median == pytest.approx(2 / 3)

    _, _, both, *_ = table(layer_tables.gains(of(FIRST, line), ""))
    assert both[3:7] == ["1", "1", "3.00 [3.00, 3.00]", "3.00 [3.00, 3.00]"]
    assert both[-2:] == ["1", "1"]
    (_, _, alone, *_) = table(layer_tables.gains(of(line), ""))
    assert alone[3:] == ["0", "1", "–", "–", "–", "–", "0", "1"]


def test_the_largest_gain_is_among_those_that_are_faster_beyond_doubt() -> None:
    doubtful = measured(case("deepbench/b"), {OWN: 30.0, WHOLE: 4.0, PARTS: 4.0, HALVES: 7.0})
    spans = [4_000_000, 40_000_000] * 4 + [40_000_000]
    rounds_ns = {**doubtful.proving.spans_ns, WHOLE: tuple(spans)}
    doubtful = dataclasses.replace(doubtful, proving=Rounds(1, rounds_ns))
    (row, *_) = table(layer_tables.gains(of(FIRST, doubtful), ""))
    assert row[7:9] == ["2.00 [2.00, 2.00]", "float32-nchw deepbench/a contiguous fprop"]


def test_a_case_in_which_no_undivided_algorithm_fits_is_counted_and_not_compared() -> None:
    line = measured(case("deepbench/c"), {OWN: 8.0, PARTS: 2.0}, best={})
    (row, _) = table(layer_tables.sums(of(FIRST, line), ""))
    assert row[2:] == ["2", "1", "8 [8, 8]", "6 [6, 6]", "4 [4, 4]", "2 [2, 2]"]
    (alone, _) = table(layer_tables.sums(of(line), ""))
    assert alone[2:4] == ["1", "1"]
    assert table(layer_tables.gains(of(line), "")) == []


def hiding(name: str, ours_ms: float, taken: int, own_bytes: int = 100 * MIB) -> Measured:
    ms = {OWN: 10.0, WHOLE: 10.0, PARTS: ours_ms, HALVES: 10.0}
    return measured(case(name), ms, own_bytes=own_bytes, taken={PARTS: taken})


def test_workspace_is_saved_only_where_that_takes_at_most_2_percent_more_time() -> None:
    assert workspace_saving(hiding("vgg16/a", 10.2, 5 * MIB)) == 20.0
    assert workspace_saving(hiding("vgg16/a", 10.3, 5 * MIB)) == 1.0
    assert workspace_saving(hiding("vgg16/a", 5.0, 0)) == math.inf


def test_workspace_is_saved_only_beyond_doubt() -> None:
    line = hiding("vgg16/a", 10.0, 5 * MIB)
    spans = (*(10_000_000,) * 5, *(10_400_000,) * 4)
    doubtful = dataclasses.replace(line, proving=Rounds(1, {**line.proving.spans_ns, PARTS: spans}))
    assert workspace_saving(doubtful) == 1.0


def test_a_saving_of_everything_is_told_in_words() -> None:
    (row, _) = table(layer_tables.savings(of(hiding("vgg16/a", 5.0, 0))))
    assert row[3] == "to nothing"


def test_savings_are_told_of_all_of_vgg_and_of_resnets_where_own_hides_much() -> None:
    lines = (
        hiding("vgg16/a", 10.0, 5 * MIB), hiding("vgg16/b", 10.0, 25 * MIB), hiding("resnet50/c", 11.0, MIB),
        hiding("alexnet/d", 10.0, 2 * MIB), hiding("vgg16/few", 10.0, MIB, own_bytes=40 * MIB),
    )  # fmt: skip
    assert table(layer_tables.savings(of(*lines))) == [
        ["float32-nchw", "all", "4", "12x", "2", "1"],
        ["float32-nchw", "VGG", "2", "12x", "1", "0"],
        ["float32-nchw", "ResNet", "1", "1x", "0", "1"],
    ]


def test_tiles_are_compared_with_the_best_without_them_in_strict_float32_3x3_layers() -> None:
    ms = {OWN: 8.0, WHOLE: 4.0, PARTS: 3.0, TILES: 1.5, HALVES: 8.0}
    lines = [
        measured(case("vgg16/a"), ms, key=TILES),
        measured(case("vgg16/5x5"), ms, key=TILES, taps=5),
        measured(case("vgg16/a", "tf32-nchw"), ms, key=TILES),
    ]
    (row, _) = table(layer_tables.tiles(of(*lines)))
    assert row[:5] == ["float32-nchw", "8 MiB", "1", "0", "2.00 [2.00, 2.00]"]


def test_own_in_parts_is_told_where_it_is_faster_than_own() -> None:
    text = [*layer_tables.in_parts(of(FIRST, SECOND))]
    assert text[0] == "* float32-nchw: 1 of 2"
    assert table(iter(text)) == [
        ["float32-nchw deepbench/a contiguous fprop", "8 MiB", "1.14 [1.14, 1.14]", "aten@4*2", "0 B", "0 B"]
    ]


def sections(text: str) -> dict[str, str]:
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in text.split("\n## ")[1:]}


def test_the_summary_tells_losses_what_gained_nothing_and_what_failed() -> None:
    slow = measured(case("vgg16/slow"), {OWN: 8.0, WHOLE: 4.0, PARTS: 9.0, HALVES: 9.0})
    kinds = {UNDIVIDED: WHOLE, IN_PARTS: HALVES}
    stays_ms = {OWN: 8.0, WHOLE: 9.0, HALVES: 9.0}
    stays = measured(case("vgg16/stays"), stays_ms, {BENCHMARK: 8.0}, key=OWN, best=kinds)
    text = summary(of(started(), FIRST, slow, stays, Failed(case("vgg16/dead"), "its process ended.")))

    told = sections(text)
    assert (
        "float32-nchw vgg16/slow contiguous fprop | 8 MiB | 0.89 [0.89, 0.89]"
        in told["Slower than PyTorch's own"]
    )
    assert "deepbench/a" not in told["Slower than PyTorch's own"]
    assert "fprop: 2 of 3: vgg16/slow, vgg16/stays" in told["Nothing gained under any limit"]
    assert "| float32-nchw vgg16/dead contiguous fprop | its process ended. |" in told["Failed"]
    assert (
        "* float32-nchw: name Some card. cuDNN 9. TF32 no. SM clock 1 MHz (date today, commit 0123)" in text
    )


def test_a_layer_gains_also_by_what_keeps_strictly_to_the_limit() -> None:
    line = measured(case("vgg16/strict"), {OWN: 8.0, WHOLE: 4.0, PARTS: 9.0, HALVES: 9.0})
    strict = dataclasses.replace(
        line, choices=tuple(dataclasses.replace(each, key=OWN, strict_key=WHOLE) for each in line.choices)
    )

    told = sections(summary(of(started(), FIRST, strict)))

    assert "fprop: 0 of 2\n" in told["Nothing gained under any limit"] + "\n"


def test_what_is_slower_than_benchmark_is_told_paired_or_not() -> None:
    paired = measured(case("vgg16/a"), {OWN: 8.0, WHOLE: 4.0, PARTS: 3.0}, {BENCHMARK: 1.5, PARTS: 3.0})
    stays = measured(case("vgg16/b"), {OWN: 3.0, WHOLE: 4.0}, {BENCHMARK: 2.0}, key=OWN)
    (one, _, other, _) = table(layer_tables.behind_benchmark(of(FIRST, paired, stays)))
    assert one[2:5] == ["0.50 [0.50, 0.50]", "the same", "eng2@2*4"]
    assert other[:4] == [
        "float32-nchw vgg16/b contiguous fprop", "8 MiB", "0.67 [0.67, 0.67]", "others",
    ]  # fmt: skip


def test_cliffs_are_told_by_the_sample_and_stand_in_no_sum() -> None:
    ms = {OWN: 8.0, WHOLE: 4.0, PARTS: 2.0, HALVES: 7.0}
    cliff = measured(case("cliffs/dw7x7"), ms)
    (row,) = table(layer_tables.cliffs(of(FIRST, cliff)))
    assert row[1:] == [
        "8", "1 [1, 1]", "0.75 [0.75, 0.75]", "64 MiB", "0.25 [0.25, 0.25]", "4.00 [4.00, 4.00]",
    ]  # fmt: skip
    (small, _) = table(layer_tables.sums(of(FIRST, cliff), ""))
    assert small[2] == "1"


def test_only_layers_that_tiles_can_compute_are_in_the_table_of_tiles() -> None:
    ms = {OWN: 8.0, WHOLE: 4.0, PARTS: 3.0, TILES: 1.5, HALVES: 8.0}
    line = measured(case("resnet18/a"), ms, key=TILES)
    strided = dataclasses.replace(line, problem=dataclasses.replace(line.problem, stride=(2, 2)))
    spread_out = dataclasses.replace(line, problem=dataclasses.replace(line.problem, dilation=(2, 2)))
    for other in (strided, spread_out):
        assert table(layer_tables.tiles(of(other))) == []


def test_the_summary_tells_all_runs_how_many_cases_there_are_and_the_clocks() -> None:
    first, last = (
        dataclasses.replace(started(), run={"date": date, "commit": date, "cases": "9"})
        for date in ("monday", "tuesday")
    )
    lines = [
        dataclasses.replace(line, conditions={"SM clock": f"{clock} MHz"})
        for line, clock in ((FIRST, 1980), (SECOND, 345))
    ]
    told = sections(summary(of(first, *lines, last, Failed(case("vgg16/dead"), "it failed."))))
    assert table(iter(told["Cases"].splitlines())) == [["float32-nchw", "2", "1", "9", "345 to 1980 MHz"]]
    assert "2 runs of 2 versions of the code." in told["Runs"]
    assert "* date monday, commit monday: float32-nchw" in told["Runs"]


def test_the_original_stands_beside_deepbench_with_its_card() -> None:
    told = sections(summary(of(FIRST)))["DeepBench's training list"]
    assert "4.54 times, and 1.60 on average" in told
    assert "V100-SXM2" in told


def at_64_mib_only(line: Measured) -> Measured:
    return dataclasses.replace(line, choices=line.choices[1:])


def test_networks_have_tables_of_their_own_with_all_limits_of_their_own_cases() -> None:
    ms = {OWN: 10.0, WHOLE: 9.0, PARTS: 10.0, HALVES: 10.0}
    large = at_64_mib_only(measured(case("vgg16_b512/b"), ms))
    text = summary(of(FIRST, large, SECOND, measured(case("cliffs/dw7x7"), ms)))

    _, *told = sections(text)["Networks"].split("### ")
    assert [part.partition("\n")[0] for part in told] == ["vgg16_b512", "vgg16"]
    sums = [table(iter(part.split("\n\n")[1].splitlines())) for part in told]
    assert [[row[1] for row in rows] for rows in sums] == [["64 MiB"], ["8 MiB", "64 MiB"]]
    assert "None was measured." in sections(summary(of(FIRST)))["Networks"]


def test_the_last_tables_have_all_limits_of_each_network() -> None:
    large = at_64_mib_only(measured(case("vgg16_b512/b"), {OWN: 9.0, WHOLE: 9.0, PARTS: 9.0}))
    lines = [line for line in layer_tables.times(of(SECOND, large)) if line.startswith(("###", "| layer"))]
    assert lines[::2] == ["### float32-nchw, vgg16, ms", "### float32-nchw, vgg16_b512, ms"]
    assert ["ours at 8 MiB" in line for line in lines[1::2]] == [True, False]


def test_the_last_table_has_all_times_of_every_case() -> None:
    nothing = measured(case("deepbench/big"), {OWN: 9.0, PARTS: 9.0}, best={})
    unfit = [Choice(each.limit_bytes, OWN, None, {}) for each in nothing.choices]
    lines = [FIRST, type(nothing)(**{**vars(nothing), "choices": tuple(unfit)})]

    first, big = table(layer_tables.times(of(*lines)))

    assert first[:6] == ["deepbench/a", "fprop", "8", "8 [8, 8]", "0 B", "6 [6, 6]"]
    assert first[6:10] == ["4 [4, 4]", "2 [2, 2]", "eng2@2*4", "0 B"]
    assert big[6:10] == ["–", "–", "nothing fits", "–"]


def test_all_policies_of_a_folder_are_retold_packed_or_not(tmp_path: Path) -> None:
    write_lines(tmp_path / "layers.jsonl", [FIRST] * 1000)
    write_lines(tmp_path / "layers-all.jsonl", [SECOND])
    (tmp_path / "steps.jsonl").write_text("{}\n")

    assert layer_run.main(["--retell", str(tmp_path)]) == 0

    assert not (tmp_path / "layers.jsonl").exists()
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["layers-all.md", "layers.md"]
    assert "vgg16/b" in (tmp_path / "layers-all.md").read_text()
    assert retell(tmp_path) == [tmp_path / "layers.md", tmp_path / "layers-all.md"]


def test_the_summary_needs_no_torch() -> None:
    code = "import sys, bench.gpu.layer_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
