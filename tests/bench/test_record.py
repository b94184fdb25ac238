"""Recordings of networks: what is kept, gone on with, and replayed."""

import dataclasses
import json
import math
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import mucudnn
from bench import record
from bench.record import AIMS, Recorder, TimeIsUpError, Watch, recording, seconds_of, summary
from bench.workloads import LAYERS, NETWORKS, SETTINGS, Setting, Workload
from mucudnn.errors import DeviceLostError, InfeasibleError, StoreError
from mucudnn.plan import Plan
from mucudnn.problem import Layout
from mucudnn.sizes import format_bytes
from tests.examples import a_plan

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Workload("small/conv", lambda: nn.Conv2d(4, 4, 3, padding=1), (2, 4, 8, 8), wants_gradient=True)
PAIR = Workload(
    "pair", lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)), (2, 3, 8, 8)
)
STRICT = next(each for each in SETTINGS if each.name == "float32-nchw")
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plans").mkdir()
    return tmp_path


def recorded(folder: Path, *workloads: Workload) -> None:
    Recorder(folder, CPU, Watch(time.monotonic() + 600)).record(workloads, [STRICT])


@pytest.fixture(scope="module")
def of_both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of both small networks."""
    folder = tmp_path_factory.mktemp("recording")
    (folder / "plans").mkdir()
    recorded(folder, SMALL, PAIR)
    return folder


def plans_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("plans/*.json")}


def test_a_recording_holds_plans_for_all_limits_and_both_modes_and_is_replayed(of_both: Path) -> None:
    assert plans_in(of_both) == {
        f"{name}.float32-nchw.{aim.name}.json" for name in ("small-conv", "pair") for aim in AIMS
    }
    with recording(of_both) as store:
        store.pack(of_both / record.PACKED)
    for aim in AIMS:
        plan = Plan.load(of_both / f"plans/pair.float32-nchw.{aim.name}.json")
        replayed = mucudnn.tune(
            PAIR.build(), torch.zeros(PAIR.shape), aim.limit, mode=aim.mode,
            backend=f"replay:{of_both / record.PACKED}",
        )  # fmt: skip
        assert replayed.sites == plan.sites


def test_the_gradient_of_the_image_is_recorded_where_it_is_wanted(of_both: Path) -> None:
    ops = {
        name: [site.op for site in Plan.load(of_both / f"plans/{name}.float32-nchw.64MiB-reuse.json").sites]
        for name in ("small-conv", "pair")
    }
    assert ops == {
        "small-conv": ["fprop", "dgrad", "wgrad"],
        "pair": ["fprop", "wgrad", "fprop", "dgrad", "wgrad"],
    }


def test_the_first_networks_come_first_in_all_precisions_and_both_layouts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def note(_: Recorder, workload: Workload, setting: Setting, store: object) -> None:
        asked.append((workload.name, setting.name))

    monkeypatch.setattr(Recorder, "_record", note)

    Recorder(folder, CPU, Watch(math.inf)).record(NETWORKS, SETTINGS)

    assert [name for name, _ in asked[:6]] == ["resnet18"] * 3 + ["unet3d"] * 3
    first = SETTINGS[:3]
    assert [setting for _, setting in asked[:3]] == [each.name for each in first]
    assert {(each.dtype, each.allow_tf32) for each in first} == {
        (each.dtype, each.allow_tf32) for each in SETTINGS
    }
    assert {each.layout for each in first} == set(Layout)
    assert sorted(asked) == sorted((workload.name, each.name) for workload in NETWORKS for each in SETTINGS)


def test_what_is_known_is_not_tuned_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(folder, SMALL)
    monkeypatch.setattr(record, "tune", lambda *_, **__: pytest.fail("it is known"))

    recorded(folder, SMALL)


def test_a_plan_of_another_environment_is_made_anew(folder: Path) -> None:
    recorded(folder, SMALL)
    path = folder / "plans/small-conv.float32-nchw.64MiB-reuse.json"
    plan = Plan.load(path)
    dataclasses.replace(plan, environment=dataclasses.replace(plan.environment, device={})).save(path)

    recorded(folder, SMALL)

    assert Plan.load(path).environment == plan.environment


def test_a_run_whose_time_is_up_is_gone_on_with(folder: Path) -> None:
    over = Recorder(folder, CPU, Watch(time.monotonic() - 1))

    with pytest.raises(TimeIsUpError, match="the next run goes on"):
        over.record([SMALL], [STRICT])
    assert plans_in(folder) == set()
    recorded(folder, SMALL)
    assert len(plans_in(folder)) == len(AIMS)


def test_time_ends_in_the_middle_of_a_network_and_what_was_measured_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([None] * 4)  # in the first problem there is time, in the second none

    def check(watch: Watch) -> None:
        if next(looks, watch) is watch:
            raise TimeIsUpError

    monkeypatch.setattr(Watch, "check", check)

    with pytest.raises(TimeIsUpError):
        recorded(folder, PAIR)

    assert plans_in(folder) == set()
    with recording(folder) as store:
        assert store.count() > 0
    assert seconds_of(folder, "pair", "float32-nchw") > 0


def test_what_cannot_be_tuned_is_told_and_the_others_are_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Workload("broken", lambda: nn.Conv2d(5, 4, 3), (2, 4, 8, 8))
    really = record.tune

    def tune(model: nn.Module, sample: object, limit: str, **others: object) -> Plan:
        if limit == "8MiB":
            raise InfeasibleError(8 * 2**20, 9 * 2**20)
        return really(model, sample, limit, **others)

    monkeypatch.setattr(record, "tune", tune)

    recorded(folder, PAIR, broken, SMALL)

    told = capsys.readouterr().out.splitlines()
    assert ["nothing fits" in line for line in told if line.startswith("pair")] == [False, False, True, False]
    assert ["failed: " in line for line in told if line.startswith("broken")] == [True, True, False, True]
    assert "small-conv.float32-nchw.64MiB-reuse.json" in plans_in(folder)


def test_whatever_one_plan_dies_of_the_others_are_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    really = record.tune

    def tune(model: nn.Module, sample: object, limit: str, **others: object) -> Plan:
        if limit == "512MiB":
            raise TypeError("an argument is missing")
        return really(model, sample, limit, **others)

    monkeypatch.setattr(record, "tune", tune)

    recorded(folder, SMALL)

    assert "failed: TypeError: an argument is missing" in capsys.readouterr().out
    assert plans_in(folder) == {f"small-conv.float32-nchw.{limit}-reuse.json" for limit in ("64MiB", "8MiB")}


def test_a_plan_in_which_processes_have_ended_at_one_place_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, twice, further = (folder / f"plans/small-conv.float32-nchw.{aim.name}.begun" for aim in AIMS[:3])
    recorded(folder, PAIR)
    with recording(folder) as store:
        known = store.count()
    once.write_text(json.dumps({"number": 1, "known": known}))
    recorded(folder, SMALL)
    with recording(folder) as store:
        known = store.count()
    for aim in AIMS:
        (folder / f"plans/small-conv.float32-nchw.{aim.name}.json").unlink()
    twice.write_text(json.dumps({"number": 2, "known": known}))
    further.write_text(json.dumps({"number": 2, "known": known - 1}))

    recorded(folder, SMALL)

    assert f"got no further; delete {twice.name} to try again" in capsys.readouterr().out
    assert plans_in(folder) >= {
        f"small-conv.float32-nchw.{aim.name}.json" for aim in AIMS if aim is not AIMS[1]
    }
    assert [path.name for path in folder.glob("plans/*.begun")] == [twice.name]


@pytest.mark.parametrize(
    ("error", "is_marked"),
    [
        (record.BrokenDeviceError("The device works no more."), True),
        (DeviceLostError("cudnn:eng1", 4, "an illegal memory access was encountered"), False),  # it is known
        (TimeIsUpError("The time is up."), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_a_plan_that_ends_its_process_is_marked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, is_marked: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Recorder, "_planned", fail)

    for number in (1, 2):
        with pytest.raises(type(error)):
            recorded(folder, SMALL)

        marks = [json.loads(path.read_text()) for path in folder.glob("plans/*.begun")]
        assert marks == ([{"number": number, "known": 0}] if is_marked else [])


def test_plans_that_are_missing_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave_out(recorder: Recorder, *_: object) -> None:
        recorder.missing += 1

    monkeypatch.setattr(Recorder, "_record", leave_out)

    assert record.main([*HERE, "--networks", "alexnet", "--output", str(tmp_path)]) == 0

    assert "Plans that are missing: 1." in capsys.readouterr().out


def test_a_network_that_cannot_be_built_is_told_and_the_others_are_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> nn.Module:
        raise KeyError("width")

    recorded(folder, Workload("broken", build, (2, 3, 8, 8)), SMALL)

    assert "failed: KeyError: 'width'" in capsys.readouterr().out
    assert "small-conv.float32-nchw.64MiB-reuse.json" in plans_in(folder)


def test_no_plan_is_kept_of_a_device_that_works_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    recorder = Recorder(folder, CPU, Watch(time.monotonic() + 600))
    monkeypatch.setattr(recorder, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.setattr(record, "tune", lambda *_, **__: a_plan())
    with recording(folder) as store, pytest.raises(record.BrokenDeviceError, match="illegal memory access"):
        recorder._planned(SMALL.build(), torch.zeros(SMALL.shape), AIMS[0], store, folder / "plans/x.json")

    assert plans_in(folder) == set()


def test_a_run_goes_on_from_a_packed_recording(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    recorded(folder, SMALL)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with recording(folder) as store:
        store.pack(elsewhere / record.PACKED)
        count = store.count()

    with recording(elsewhere) as store:
        assert store.count() == count > 0


def test_what_tuning_takes_is_kept_and_added_up(folder: Path) -> None:
    recorded(folder, SMALL, PAIR)

    lines = [json.loads(line) for line in (folder / record.COSTS).read_text().splitlines()]
    assert [(line["network"], line["aim"]) for line in lines] == [
        (each.name, aim.name) for each in (SMALL, PAIR) for aim in AIMS
    ]
    assert lines[0]["trials"] > 0 == lines[1]["trials"]  # the first limit is the largest
    assert seconds_of(folder, "pair", "float32-nchw") == pytest.approx(
        sum(line["seconds"] for line in lines if line["network"] == "pair")
    )


def test_a_recording_is_packed_now_and_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_PACKING_S", 0.0)

    recorded(folder, SMALL)

    assert (folder / record.PACKED).exists()


@pytest.mark.parametrize(
    "error",
    [
        DeviceLostError("cudnn:eng1", 4, "an illegal memory access was encountered"),
        record.BrokenDeviceError("The device works no more."),
    ],
)
@pytest.mark.parametrize(("seconds", "goes_on"), [("1000", True), ("inf", True), ("5", False)])
def test_when_the_device_is_lost_another_process_goes_on_if_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str, goes_on: bool, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    started: list[list[str]] = []
    monkeypatch.setattr(Recorder, "_planned", fail)
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command[3:]))
    given = [*HERE, "--networks", "resnet18", "densenet40", "--output", str(tmp_path)]

    status = record.main([*given, "--seconds", seconds])

    assert status == 1
    assert (tmp_path / record.PACKED).exists()
    assert len(started) == goes_on
    for command in started:
        options, first = (vars(record._parser().parse_args(each)) for each in (command, given))
        assert float(seconds) - 100 <= options.pop("seconds") <= float(seconds)
        first.pop("seconds")
        assert options == first


def test_what_ends_a_run_is_told_and_what_there_is_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(Recorder, "_planned", fail)

    status = record.main([*HERE, "--networks", "densenet40", "--output", str(tmp_path)])

    assert status == 1
    assert "Run the same command again to go on." in capsys.readouterr().err
    assert (tmp_path / record.PACKED).exists()


HERE = ["--device", "cpu", "--settings", "float32-nchw"]


def test_the_program_writes_recording_plans_and_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "NETWORKS", (PAIR,))
    monkeypatch.setattr(record, "LAYERS", (SMALL,))

    status = record.main([*HERE, "--output", str(tmp_path)])

    assert status == 0
    assert (tmp_path / record.PACKED).exists()
    text = (tmp_path / "summary.txt").read_text()
    assert text.rstrip() == summary(tmp_path)
    assert text.count("MiB-") == 2 * len(AIMS)
    printed = capsys.readouterr().out
    assert "All is recorded." in printed
    assert printed.index("pair ") < printed.index("small/conv ")  # single layers come last


def test_a_recording_that_is_too_large_to_be_shipped_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "NETWORKS", (SMALL,))
    monkeypatch.setattr(record, "LAYERS", ())
    monkeypatch.setattr(record, "MOST_BYTES", 1000)

    record.main([*HERE, "--output", str(tmp_path)])

    assert f"more than {format_bytes(1000)}" in capsys.readouterr().out


def test_names_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert record.main(["--networks", "lenet"]) == 2
    assert "no network or no setting has such a name" in capsys.readouterr().err


def test_every_workload_has_a_file_name_of_its_own() -> None:
    names = [each.name for each in (*NETWORKS, *LAYERS)]

    assert len(set(names)) == len(names) == len({name.replace("/", "-") for name in names})
    assert not any("." in name for name in [*names, *(each.name for each in SETTINGS)])


def test_every_network_is_built_for_its_images() -> None:
    for workload in (*NETWORKS, *LAYERS):
        with torch.device("meta"):
            y = workload.build()(torch.empty((2, *workload.shape[1:])))
        assert y.shape[0] == 2


@pytest.mark.parametrize("name", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        record.main(["--device", name])
    assert "device" in capsys.readouterr().err.splitlines()[-1]


def test_an_interrupt_keeps_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "record", interrupt)

    assert record.main([*HERE, "--output", str(tmp_path)]) == 130
    assert "interrupted; the next run goes on" in capsys.readouterr().err
    assert (tmp_path / record.PACKED).exists()
