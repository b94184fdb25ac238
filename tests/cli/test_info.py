"""`mucudnn info`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mucudnn import backends
from mucudnn.algorithms.compiled.compiler import compiled_folder
from mucudnn.backends.cudnn.devices import device_described
from mucudnn.cli.info import describe_spinning
from mucudnn.intervals import Estimate
from mucudnn.recordings import shipped
from mucudnn.store import SqliteStore
from mucudnn.version import __version__
from tests.alone import Server
from tests.cli.commands import assert_one_sentence, damage, run
from tests.examples import a_record, an_environment, copy_in_a_write
from tests.threads import threads

WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

TEAM = "Worker threads are OpenMP's own: after an operation they take {} times as long as after a rest."
POOL = "After an operation OpenMP's idle threads spin: worker threads take {} times as long meanwhile."
ADVICE = (
    " With GOMP_SPINCOUNT=10000 in the environment before the start idle threads sleep sooner; mucudnn never "
    "sets it."
)

COSTLY = Estimate(1.25, 1.06, 1.5, 10)
CHEAP = Estimate(1.25, 1.04, 1.5, 10)


@pytest.fixture(autouse=True)
def _no_idle_thread(one_thread: None) -> None:
    """Spare tests of anything else the second in which it is measured what idle threads cost."""


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's threads: one computes, one may be idle, and nobody has said how it waits."""
    for variable in WAITING_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with threads(2):
        yield


def test_a_recording_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    result = run("info", "--store", "replay:xeon")

    assert_one_sentence(
        result, "mucudnn: A store must be a file, but got 'replay:xeon': a recording is a backend."
    )


def test_info_tells_version_environment_and_store(store_path: Path) -> None:
    with SqliteStore(store_path) as store:
        store.add_records(an_environment(), [a_record()])

    result = run("info")

    labels = [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert (result.exit_code, result.stderr) == (0, "")
    assert labels == [
        *("mucudnn", "device", "software", "settings", "system"),
        *("store", "compiled", "cuDNN", "recordings", "described"),
    ]
    recordings = f"recordings {', '.join(shipped())} (for mucudnn tune --backend replay:NAME)"
    assert recordings in " ".join(result.stdout.split())
    assert f"compiled code {compiled_folder()} (which may" in " ".join(result.stdout.split())
    assert f"{store_path}, 1 records" in " ".join(result.stdout.split())  # a long path breaks the line


def test_info_tells_of_the_processor_and_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = an_environment(backend="cudnn", device={"name": "NVIDIA H200"}, soft={"driver": "580"})
    backend_of = backends.backend_of

    def stand_in(algorithm: str, *device: torch.device) -> Any:
        is_card = algorithm == "cudnn:"
        return SimpleNamespace(environment=lambda: card) if is_card else backend_of(algorithm, *device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "backend_of", stand_in)

    lines = run("info").stdout.splitlines()
    value = json.loads(run("info", "--json").stdout)

    places = [line for line in lines if line.startswith(("device", "system"))]
    assert [line.split()[0] for line in places] == ["device", "system", "device", "system"]
    assert places[2].split()[1:] == ["cudnn:", "name", "NVIDIA", "H200"]
    assert places[3].split()[1:] == ["driver", "580"]
    assert value["environment"]["backend"] == "cpu"
    assert value["card"] == card.to_json()


def test_info_tells_why_a_card_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", broken)

    why = "It cannot be used: CUDA error: all CUDA-capable devices are busy or unavailable"
    assert f"card {why}" in " ".join(run("info").stdout.split())
    assert json.loads(run("info", "--json").stdout)["card"] == {"problem": why}


@pytest.mark.gpu
def test_info_tells_of_the_card_that_is_there() -> None:
    card = json.loads(run("info", "--json").stdout)["card"]

    assert card["device"]["name"] == torch.cuda.get_device_name()
    assert card["policy"]["TF32"] in ("True", "False")


def test_info_makes_no_store(store_path: Path) -> None:
    assert json.loads(run("info", "--json").stdout)["store"] == {
        "path": str(store_path),
        "records": 0,
        "environments": [],
    }
    assert f"{store_path}, which does not exist yet" in " ".join(run("info").stdout.split())
    assert not store_path.exists()


def test_info_numbers_the_environments_of_a_store_as_a_replay_does(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite3"
    environments = [an_environment(policy={"threads": threads}) for threads in ("1", "2")]
    with SqliteStore(path) as store:
        for environment in environments:
            store.add_records(environment, [a_record()])

    text = " ".join(run("info", "--store", path).stdout.split())
    value = json.loads(run("info", "--store", path, "--json").stdout)["store"]

    assert f"{path}, 2 records of 2 environments" in text
    assert "#1: cpu, setting threads 1 #2: cpu, setting threads 2" in text
    assert value["environments"] == [each.to_json() for each in environments]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_info_leaves_an_empty_file_as_it_is(store_path: Path, options: list[str]) -> None:
    store_path.parent.mkdir(parents=True, exist_ok=True)
    store_path.touch()

    result = run("info", *options)

    assert (result.exit_code, result.stderr) == (0, "")
    assert store_path.read_bytes() == b""


def test_info_undoes_a_write_that_a_crash_tore(tmp_path: Path) -> None:
    path, crashed = tmp_path / "profiles.sqlite3", tmp_path / "crashed.sqlite3"
    with SqliteStore(path) as store:
        store.add_records(an_environment(), [a_record()])
    copy_in_a_write(path, crashed)

    value = json.loads(run("info", "--store", crashed, "--json").stdout)

    assert (value["report"], value["store"]["records"]) == ("info", 1)


def test_info_says_that_a_folder_is_no_store(store_path: Path) -> None:
    store_path.mkdir(parents=True)

    result = run("info")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"mucudnn: {store_path} cannot be used as a store: it is a folder")
    assert "which cannot be read" in " ".join(result.stdout.split())


def test_info_tells_of_the_machine_though_the_store_cannot_be_looked_for(tmp_path: Path) -> None:
    result = run("info", "--store", str(tmp_path / ("x" * 300)))

    assert result.exit_code == 1
    assert "File name too long" in result.stderr
    assert __version__ in result.stdout


def test_info_has_facts_as_json() -> None:
    value = json.loads(run("info", "--json").stdout)

    assert value["version"] == __version__
    assert "torch" in value["environment"]["software"]
    assert "threads" in value["environment"]["policy"]


@pytest.mark.usefixtures("two_threads")
def test_info_tells_what_an_operation_costs_workers_after_it() -> None:
    interval = r"\d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]"
    told = re.escape(TEAM).replace(r"\{\}", interval)

    assert re.search(f" idle threads {told}", " ".join(run("info").stdout.split()))


@pytest.mark.parametrize(
    ("workers", "told"), [({"workers": "team"}, TEAM), ({"workers": "pool"}, POOL), ({}, POOL)]
)
def test_an_operation_that_costs_workers_time_is_told_with_what_would_help(
    workers: dict[str, str], told: str
) -> None:
    environment = an_environment(policy={"threads": "8", **workers})

    assert describe_spinning(COSTLY, environment) == told.format("1.25 [1.06, 1.50]") + ADVICE


@pytest.mark.parametrize(("scheme", "told"), [("team", TEAM), ("pool", POOL)])
def test_nothing_is_advised_where_the_cost_may_be_nothing(scheme: str, told: str) -> None:
    environment = an_environment(policy={"threads": "8", "workers": scheme})

    assert describe_spinning(CHEAP, environment) == told.format("1.25 [1.04, 1.50]")


@pytest.mark.parametrize("variable", WAITING_VARIABLES)
def test_nothing_is_advised_to_who_has_told_idle_threads_how_to_wait(variable: str) -> None:
    environment = an_environment(policy={"threads": "8", variable: "1000"})

    assert describe_spinning(COSTLY, environment) == POOL.format("1.25 [1.06, 1.50]")


@pytest.mark.usefixtures("two_threads")
def test_info_has_the_cost_of_idle_threads_as_json() -> None:
    spinning = json.loads(run("info", "--json").stdout)["spinning"]

    assert 0 < spinning["low"] <= spinning["median"] <= spinning["high"]
    assert spinning["samples"] == 10


def test_info_measures_nothing_where_no_thread_is_idle() -> None:
    assert json.loads(run("info", "--json").stdout)["spinning"] is None


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_info_works_beside_a_damaged_store(store_path: Path, options: list[str]) -> None:
    damage(store_path)

    result = run("info", *options)

    assert result.exit_code == 1
    assert result.stderr == (
        f"mucudnn: {store_path} cannot be used as a store: file is not a database; move it away, or choose "
        "another store.\n"
    )
    assert str(store_path) in result.stdout
    assert __version__ in result.stdout


def test_info_names_the_gpus_that_can_be_described() -> None:
    assert json.loads(run("info", "--json").stdout)["devices"] == ["h200", "h100", "a100"]


@pytest.mark.deviceless
def test_info_tells_version_and_path_of_cudnn() -> None:
    cudnn = json.loads(run("info", "--json").stdout)["cudnn"]

    assert cudnn["problem"] is None
    assert cudnn["version"].startswith("9.")
    assert Path(cudnn["path"]).name == "libcudnn.so.9"


def test_info_tells_why_there_is_no_cudnn(alone: Server) -> None:
    # Of a process's second platform nothing is found: cuDNN runs on Linux only.
    program = "import sys; sys.platform = 'plan9'; import mucudnn.cli; mucudnn.cli.main(['info', '--json'])"

    assert json.loads(alone.run(program))["cudnn"] == {
        "version": None,
        "path": None,
        "problem": "cuDNN can be used on Linux only, but this system is 'plan9'.",
    }


@pytest.mark.deviceless
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_there_is_no_gpu_none_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"

    result = run("info", "--export-device", path)

    assert_one_sentence(result, "mucudnn: There must be a GPU to export, but cuDNN finds none: ")
    assert not path.exists()


@pytest.mark.gpu
def test_an_exported_gpu_is_one_to_forecast_for(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"

    result = run("info", "--export-device", path)

    assert (result.exit_code, result.stdout) == (0, "")
    assert device_described(str(path)).name == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("more", [("--json",), ("--store", "profiles.sqlite3")])
def test_what_an_exported_description_has_no_use_for_is_refused(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    result = run("info", "--export-device", tmp_path / "gpu.json", *more)

    assert result.exit_code == 2
    assert f"{more[0]}': --export-device writes nothing else" in " ".join(result.stderr.split())
    assert not (tmp_path / "gpu.json").exists()


def test_notes_are_as_wide_as_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.cli.output.columns", lambda _: 60)

    lines = run("info").stdout.splitlines()

    assert max(len(line) for line in lines if "/" not in line) <= 60  # paths are not broken
