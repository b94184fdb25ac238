"""Recordings that come with the package: replayed on any machine, by both solvers, under a name."""

import functools
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn

import mucudnn
from bench import deepbench
from bench.networks import resnet18
from bench.ship import MOST_BYTES, main, ship
from bench.workloads import NETWORKS, SETTINGS, chosen, operands
from mucudnn import recordings
from mucudnn.algorithms.compiled import compiler as compilers
from mucudnn.division import Division
from mucudnn.errors import StoreError
from mucudnn.plan import ConvSite, Plan
from mucudnn.recordings import packed_file, recording_file, shipped
from mucudnn.report.totals import Totals
from mucudnn.sizes import parse_bytes
from mucudnn.solvers.ilp import solve_sharing, solve_with_cbc, solve_with_highs
from mucudnn.store import SqliteStore, readable_store
from tests.breadth import in_turn
from tests.examples import a_record, an_environment
from tests.models import a_batch, a_chain, an_extraction
from tests.plans import algorithms_of
from tests.recordings import MIB, Elsewhere, a_backend, record

pytestmark = pytest.mark.usefixtures("one_thread")

LEAST_RECORDS = 1000
"""Of a recording that is worth shipping: some hundred problems and sizes, several algorithms each."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that comes with no recording yet."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    monkeypatch.setattr(recordings, "_FOLDER", folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have both solvers share out what one is asked to, and agree; the list has the limit of each time."""
    limits: list[int] = []

    def solve(fronts: Mapping[ConvSite, Sequence[Division]], limit_bytes: int) -> dict[ConvSite, Division]:
        limits.append(limit_bytes)
        by_highs, by_cbc = (
            solve_sharing(fronts, limit_bytes, each) for each in (solve_with_highs, solve_with_cbc)
        )
        assert by_highs == by_cbc
        return by_highs

    monkeypatch.setattr("mucudnn.tuning.solving.solve_sharing", solve)
    return limits


def replayed(name: str) -> Plan:
    return mucudnn.tune(a_chain(), a_batch(), MIB, backend=f"replay:{name}", progress=False)


def test_stores_are_shipped_as_one_recording_of_all_their_environments(package: Path) -> None:
    chain = an_extraction(a_chain())
    plan = record(Path("here"), a_backend(), chain)
    record(Path("there"), Elsewhere({}), chain)

    assert ship("two", [Path("here"), Path("there")]) == packed_file("two")

    assert shipped() == ("two",)
    assert replayed("two#1").sites == plan.sites
    assert replayed("two#2").environment.policy == {"threads": "9"}


def test_one_environment_of_a_store_is_shipped_alone(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = an_extraction(a_chain())
    record(Path("both"), a_backend(), chain)
    record(Path("both"), Elsewhere({}), chain)

    assert main(["second", "both", "--only", "2"]) == 0
    assert replayed("second").environment.policy == {"threads": "9"}
    for number in ("0", "3"):
        assert main(["third", "both", "--only", number]) == 1
        assert f"both must hold environment {number}, but has 2." in capsys.readouterr().err


def test_a_file_here_is_meant_rather_than_a_recording_of_its_name(package: Path) -> None:
    record(Path("mine"), a_backend(), an_extraction(a_chain()))
    ship("mine", [Path("mine")])

    assert recording_file("mine") == Path("mine")
    Path("mine").unlink()
    assert recording_file("mine") == package / "mine.sqlite3.gz"


def test_a_folder_of_a_recordings_name_does_not_hide_it(package: Path) -> None:
    record(Path("store"), a_backend(), an_extraction(a_chain()))
    ship("mine", [Path("store")])
    Path("mine").mkdir()

    assert replayed("mine").environment.backend == "scripted"


def test_an_unknown_recording_is_refused_with_those_that_there_are(package: Path) -> None:
    record(Path("store"), a_backend(), an_extraction(a_chain()))
    ship("one", [Path("store")])

    with pytest.raises(StoreError, match=r"other cannot be .* no such file\. Recordings that come .*: one\."):
        replayed("other")


def test_what_holds_nothing_or_is_no_store_is_not_shipped(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SqliteStore(Path("empty")).close()
    Path("text").write_text("no store " * 1000)

    assert main(["name", "empty"]) == 1
    assert main(["name", "text"]) == 1
    assert shipped() == ()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "bench.ship: A recording must hold something, but got stores without records."
    assert "text cannot be used as a store" in told[1]


def test_what_is_too_large_is_not_shipped(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.ship.MOST_BYTES", 100)
    with SqliteStore(Path("store")) as store:
        store.add_records(an_environment(), [a_record()])

    with pytest.raises(
        StoreError, match=r"must be of at most 100 B, but this one is of .*; ship fewer networks"
    ):
        ship("large", [Path("store")])
    assert shipped() == ()


def test_whoever_ships_is_told_what_it_holds(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SqliteStore(Path("store")) as store:
        store.add_records(an_environment(), [a_record()])

    assert main(["example", "store"]) == 0

    assert capsys.readouterr().out.startswith("example.sqlite3.gz: 1 records in ")


def test_a_name_is_one_that_a_replay_can_ask_for(package: Path) -> None:
    with pytest.raises(StoreError, match="must be of a-z, 0-9 and -, such as h200, but got 'a#1'"):
        ship("a#1", [Path("store")])


def test_a_name_that_no_file_can_have_is_refused(package: Path) -> None:
    with pytest.raises(StoreError, match="too long"):
        replayed(300 * "a")


def test_recordings_of_two_processors_and_a_card_come_with_the_package() -> None:
    assert {"epyc", "xeon", "h200"} <= set(shipped())


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_recording_is_small_whole_and_names_no_folder(name: str) -> None:
    path = recording_file(name)

    assert path.stat().st_size <= MOST_BYTES
    with readable_store(path) as store:
        assert store.count() >= LEAST_RECORDS
    contents = gzip.decompress(path.read_bytes())
    assert [folder for folder in (b"/home", b"/root", b"/tmp", b"/usr") if folder in contents] == []


def thorough(*values: object) -> ParameterSet:
    """One more of a list, for which others stand that are like it."""
    return pytest.param(*values, marks=pytest.mark.thorough)


@functools.cache  # whoever tunes a model leaves it as it is
def demonstrated(order: torch.memory_format = torch.contiguous_format) -> nn.Module:
    return resnet18().to(memory_format=order)


@in_turn("name", ["epyc", "xeon"], mode=["reuse", "sharing"], channels_last=[False, True])
def test_the_demonstration_is_replayed_in_both_modes_and_layouts_and_by_both_solvers(
    mode: str, channels_last: bool, name: str, agreed: list[int]
) -> None:
    limit = {"reuse": "16MiB", "sharing": "64MiB"}[mode]
    order = torch.channels_last if channels_last else torch.contiguous_format
    model, sample = demonstrated(order), a_batch(64, 3, 32).contiguous(memory_format=order)

    plan = mucudnn.tune(model, sample, limit, mode=mode, backend=f"replay:{name}", progress=False)

    assert plan.workspace_bytes <= parse_bytes(limit)
    assert agreed == [parse_bytes(limit)] * (mode == "sharing")  # reuse needs no solver
    assert not all(each.is_kept for each in plan.assignments)


def test_training_in_mixed_precision_is_replayed_too() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        sample = a_batch(64, 3, 32)
        plan = mucudnn.tune(demonstrated(), sample, "64MiB", backend="replay:xeon", progress=False)

    assert {each.problem.dtype for each in plan.assignments} == {"bfloat16"}
    assert any(each.startswith("cpu:bf16x1") for each in algorithms_of(plan))


def with_any_weights(model: nn.Module) -> nn.Module:
    """Have a network whose layers are on no device lie here; to draw its weights takes a second."""
    return model.to_empty(device="cpu")


CARD_NETWORKS = {each.name: each for each in NETWORKS}


@pytest.mark.parametrize(
    ("network", "mode", "limit"),
    [
        *(("resnet18", "reuse", limit) for limit in ("8MiB", "512MiB")),
        thorough("resnet18", "reuse", "64MiB"),
        *((network, "reuse", "64MiB") for network in ("unet3d", "alexnet")),
        thorough("resnet18", "sharing", "512MiB"),
        *((network, "sharing", "512MiB") for network in ("unet3d", "alexnet")),
    ],
)
def test_what_a_card_measured_is_replayed_without_one_in_both_modes_and_by_both_solvers(
    mode: str, limit: str, network: str, agreed: list[int]
) -> None:
    workload = CARD_NETWORKS[network]
    with torch.device("meta"):
        model, sample = workload.build(), torch.zeros(workload.shape)

    plan = mucudnn.tune(
        with_any_weights(model), sample, limit, mode=mode, backend="replay:h200", progress=False
    )

    assert plan.workspace_bytes <= parse_bytes(limit)
    assert agreed == [parse_bytes(limit)] * (mode == "sharing")
    assert any(each.startswith("cudnn:eng") for each in algorithms_of(plan))


@pytest.mark.parametrize(
    ("network", "setting", "mode", "limit"),
    [
        ("resnet18", "bfloat16-nhwc", "reuse", "8MiB"),
        thorough("resnet18", "bfloat16-nhwc", "reuse", "512MiB"),
        ("resnet18", "tf32-nchw", "reuse", "8MiB"),
        *(thorough("resnet18", "tf32-nchw", "reuse", limit) for limit in ("64MiB", "512MiB")),
        thorough("resnet18", "bfloat16-nhwc", "sharing", "512MiB"),
        ("resnet18", "tf32-nchw", "sharing", "512MiB"),
        thorough("resnet50", "bfloat16-nhwc", "reuse", "64MiB"),
        ("resnet50", "bfloat16-nhwc", "sharing", "64MiB"),
        ("alexnet", "tf32-nchw", "reuse", "64MiB"),
        thorough("alexnet", "tf32-nchw", "sharing", "64MiB"),
    ],
)
def test_what_a_card_measured_in_fewer_digits_is_replayed_by_both_solvers(
    network: str, setting: str, mode: str, limit: str, agreed: list[int]
) -> None:
    (asked,) = chosen([setting], SETTINGS)
    with torch.device("meta"):
        model, sample = operands(CARD_NETWORKS[network], asked, torch.device("meta"))

    plan = mucudnn.tune(
        with_any_weights(model), sample, limit, mode=mode, backend="replay:h200-tf32", progress=False
    )

    assert plan.workspace_bytes <= parse_bytes(limit)
    assert agreed == [parse_bytes(limit)] * (mode == "sharing")
    seen = [each.evidence for each in plan.assignments if each.evidence is not None]
    assert seen
    assert mode == "sharing" or not any(each.is_predicted for each in seen)


@functools.cache
def deepbench_plan(dtype: torch.dtype, order: torch.memory_format, limit: str) -> Plan:
    return tuned_deepbench(dtype, order, limit, "reuse")


def tuned_deepbench(dtype: torch.dtype, order: torch.memory_format, limit: str, mode: str) -> Plan:
    with torch.device("meta"):
        layers = deepbench.b16().to(dtype).to(memory_format=order)
    model, samples = with_any_weights(layers), torch.zeros(16, dtype=dtype)
    return mucudnn.tune(model, samples, limit, mode=mode, backend="replay:h200-deepbench", progress=False)


@pytest.mark.parametrize(
    ("dtype", "order", "limit", "divided"),
    [
        (torch.bfloat16, torch.contiguous_format, "8MiB", 58),
        (torch.bfloat16, torch.contiguous_format, "64MiB", 12),
        (torch.bfloat16, torch.contiguous_format, "512MiB", 0),
        (torch.float32, torch.channels_last, "8MiB", 10),
        (torch.float32, torch.channels_last, "64MiB", 2),
    ],
)
def test_all_of_deepbench_is_replayed_by_the_rounds_of_a_card(
    dtype: torch.dtype, order: torch.memory_format, limit: str, divided: int
) -> None:
    plan = deepbench_plan(dtype, order, limit)

    assert len(plan.assignments) == 150
    assert plan.workspace_bytes <= parse_bytes(limit)
    seen = [each.evidence for each in plan.assignments if each.evidence is not None]
    assert [each.is_predicted for each in seen] == [False] * 150
    assert Totals.of(plan).divided == divided


def seconds_of(plan: Plan) -> float:
    """What all sites take by the rounds of the recording, or by what was predicted where there are none."""
    return sum(
        each.division.time_s if each.evidence is None else each.evidence.chosen.median
        for each in plan.assignments
    )


@pytest.mark.parametrize(
    ("dtype", "order", "limits"),
    [
        thorough(torch.bfloat16, torch.contiguous_format, ("4MiB", "16MiB", "64MiB")),
        (torch.bfloat16, torch.contiguous_format, ("8MiB", "64MiB", "512MiB")),
        (torch.float32, torch.channels_last, ("8MiB", "64MiB")),
    ],
)
def test_a_larger_limit_never_makes_deepbench_slower(
    dtype: torch.dtype, order: torch.memory_format, limits: tuple[str, ...]
) -> None:
    seconds = [seconds_of(deepbench_plan(dtype, order, limit)) for limit in limits]

    assert seconds == sorted(seconds, reverse=True)


def test_all_of_deepbench_shares_a_limit_by_either_solver(agreed: list[int]) -> None:
    plan = tuned_deepbench(torch.bfloat16, torch.contiguous_format, "1GiB", "sharing")

    assert agreed == [2**30]
    assert sum(each.division.workspace_bytes for each in plan.assignments) <= 2**30
    assert seconds_of(plan) <= 20e-3  # PyTorch's own takes 12.8 ms, in whatever memory


@pytest.mark.parametrize("name", ["epyc", "xeon"])
def test_what_was_compiled_on_the_recorded_machine_is_replayed_without_a_compiler(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_able", None)  # to look for one raises
    compilers.compiler.cache_clear()

    plan = mucudnn.tune(demonstrated(), a_batch(64, 3, 32), "16MiB", backend=f"replay:{name}", progress=False)

    assert any(each.startswith("cpu:cc_winograd") for each in algorithms_of(plan))
