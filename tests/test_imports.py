"""What an import loads, as a fresh process sees it."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.alone import Server, waiting_as_here
from tests.plans import a_plan_for

PURE = (
    "errors", "sizes", "problem", "intervals", "timing", "profile", "plan", "standing", "store", "solvers",
    "forecast", "profiling.profiler", "profiling.replay", "live.turns", "tuning.confirming",
    "comparing.taking_back", "report",
)  # fmt: skip


def _output(program: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return finished.stdout


def _loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that are loaded after `statement`."""
    return {
        name.partition(".")[0] for name in _output(f"{statement}; import sys; print(*sys.modules)").split()
    }


def test_pure_modules_load_no_torch() -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {PURE}:\n"
        "    for loaded in [each for each in sys.modules if each.partition('.')[0] == 'mucudnn']:\n"
        "        del sys.modules[loaded]\n"  # so that none has what another one has imported
        "    importlib.import_module(f'mucudnn.{name}')\n"
        "    print(name, 'torch' in sys.modules)\n"
    )

    assert _output(program).splitlines() == [f"{name} False" for name in PURE]


def test_what_runs_on_a_card_goes_without_what_its_environment_may_lack(alone: Server) -> None:
    from bench.gpu import install

    lacking = {"highspy", "matplotlib", "scipy", "sklearn"} - install.REQUIRED.keys()
    hidden = f"import sys; sys.modules.update(dict.fromkeys({sorted(lacking)}))"  # None is no module
    imported = (
        "import bench.gpu.watch, bench.gpu.steps, bench.gpu.layer_run, bench.gpu.layer_child, bench.record"
    )

    assert alone.run(f"{hidden}; {imported}; print('well')") == "well"


def test_the_package_loads_nothing_heavy() -> None:
    heavy = {"cupy", "highspy", "matplotlib", "numpy", "pulp", "sklearn", "torch"}

    assert _loaded_by("import mucudnn") & heavy == set()


def test_a_report_loads_what_draws_when_it_is_asked_for_a_picture() -> None:
    assert "matplotlib" not in _loaded_by("import mucudnn.cli")


CALLS = ["mucudnn.optimize", "try: raise MemoryError\n    except MemoryError: mucudnn.optimize"]


@functools.cache
def _said_when_all_is_loaded_after(call: str, alone: Server) -> list[str]:
    """Return what is left of the caller then, and whether random numbers are where they were."""
    program = (
        "import gc, random, weakref, mucudnn\n"
        "random.seed(0)\n"
        "before = random.getstate()\n"
        "class Data: pass\n"
        "def caller():\n"
        "    data = Data()\n"
        f"    {call}\n"  # which is imported now
        "    return weakref.ref(data)\n"
        "data = caller()\n"
        "gc.collect()\n"
        "[getattr(mucudnn, name) for name in mucudnn.__all__]\n"  # and all else
        "print(data(), random.getstate() == before)\n"
    )
    return alone.run(program).split()


@pytest.mark.parametrize("call", CALLS)
def test_what_is_loaded_later_keeps_nothing_of_its_caller(call: str, alone: Server) -> None:
    left, _ = _said_when_all_is_loaded_after(call, alone)
    assert left == "None"


@pytest.mark.parametrize("call", CALLS)
def test_what_is_loaded_later_draws_no_random_numbers(call: str, alone: Server) -> None:
    _, are_where_they_were = _said_when_all_is_loaded_after(call, alone)
    assert are_where_they_were == "True"


def test_the_package_loads_no_cudnn_library() -> None:
    assert "libcudnn" not in _output("import mucudnn; print(open('/proc/self/maps').read())")


@pytest.mark.usefixtures("one_thread")
def test_who_compiles_nothing_loads_no_compiler(tmp_path: Path, alone: Server) -> None:
    path = tmp_path / "plan.json"
    a_plan_for(nn.Conv2d(4, 4, 3), torch.ones(2, 4, 8, 8)).save(path)
    loaded = alone.run(
        "import sys, torch, mucudnn; torch.set_num_threads(1); model = torch.nn.Conv2d(4, 4, 3); "
        f"mucudnn.apply(model, mucudnn.Plan.load({str(path)!r})); "
        "model(torch.ones(2, 4, 8, 8)).sum().backward(); assert vars(model)['_conv_forward']; "
        "print(*sys.modules)",
        **waiting_as_here(),
    ).split()

    assert "mucudnn.patching.compiling" in loaded
    assert not {"torch._dynamo", "sympy"} & {*loaded}
