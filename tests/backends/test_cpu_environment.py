"""The processor's environment tells on which threads calls run beside one another."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mucudnn.algorithms.workers import worker_scheme
from mucudnn.backends.cpu import environment
from mucudnn.backends.cpu.environment import present_environment
from tests.alone import Server


@pytest.mark.usefixtures("two_threads")
def test_the_environment_of_several_threads_has_the_scheme_of_workers() -> None:
    assert present_environment().policy["workers"] == worker_scheme() == "team"


@pytest.mark.usefixtures("one_thread")
def test_the_environment_of_one_thread_has_no_workers() -> None:
    assert "workers" not in present_environment().policy


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE", "MALLOC_TOP_PAD_"])
def test_what_libraries_are_told_by_variables_is_in_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = present_environment()
    monkeypatch.setenv(name, "some")

    assert name not in before.policy
    assert before.differences(present_environment()) == [f"setting {name} was unset, is some"]


@pytest.fixture
def precisions() -> Iterator[list[Any]]:
    """Where PyTorch keeps how convolutions and products may round float32."""
    backends = torch.backends
    flags = [backends.mkldnn.conv, backends.mkldnn.matmul, backends.cuda.matmul]
    before = [flag.fp32_precision for flag in flags]
    yield flags
    for flag, precision in zip(flags, before, strict=True):
        flag.fp32_precision = precision


@pytest.mark.parametrize("place", [0, 1])
def test_exact_float32_is_the_same_whether_or_not_it_was_asked_for(place: int, precisions: list[Any]) -> None:
    before = present_environment()
    precisions[place].fp32_precision = "ieee"

    assert present_environment().key == before.key


@pytest.mark.usefixtures("precisions")
def test_the_highest_precision_of_products_which_is_the_usual_one_changes_nothing() -> None:
    before = present_environment()
    torch.set_float32_matmul_precision("highest")

    assert present_environment().key == before.key


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000\n", None), ("150000 100000\n", "150000 100000"), (None, None)]
)
def test_the_quota_of_a_container_is_in_the_environment(
    text: str | None, quota: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu.max"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(environment, "_QUOTA", path)

    assert present_environment().device.get("processor quota") == quota


def test_a_forked_child_has_another_environment_since_it_has_another_scheme(alone: Server) -> None:
    program = (
        "import os, torch\n"
        "from mucudnn.backends.cpu.environment import present_environment\n"
        "torch.set_num_threads(2)\n"
        "here = present_environment()\n"
        "if os.fork() == 0:\n"
        "    print(here.differences(present_environment()), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )

    assert alone.run(program) == "['setting workers was team, is pool']"


_WHO_RUNS_THE_LOOPS = (
    "from mucudnn.backends.cpu.environment import present_environment\n"
    "print(present_environment().policy['loops'])\n"
)


def test_the_environment_tells_that_torchscript_runs_the_loops(alone: Server) -> None:
    assert alone.run(_WHO_RUNS_THE_LOOPS) == "TorchScript"


def test_the_environment_tells_that_python_runs_the_loops_where_torchscript_is_off() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", _WHO_RUNS_THE_LOOPS],
        env={**os.environ, "PYTORCH_JIT": "0"},  # which torch reads as it is loaded
        capture_output=True,
        text=True,
        check=True,
    )

    assert finished.stdout.strip() == "Python"


def test_where_new_tensors_lie_does_not_matter() -> None:
    with torch.device("meta"):
        elsewhere = present_environment()

    assert elsewhere == present_environment()


PINNED = """
import os, torch
torch.set_num_threads(2)
from mucudnn.backends.cpu.environment import usable_processors
before = usable_processors()
torch.ones(2**17).mul_(1)
print(len(before), len(usable_processors()), len(os.sched_getaffinity(0)))
"""
HERE = sorted(os.sched_getaffinity(0))
TWO = min(len(HERE), 2)


@pytest.mark.parametrize(
    ("variables", "processors"),
    [
        ({"OMP_PROC_BIND": "true"}, TWO),
        ({"GOMP_CPU_AFFINITY": " ".join(map(str, HERE))}, TWO),
    ],
    ids=["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"],
)
def test_a_thread_that_is_pinned_to_one_processor_has_those_of_the_process(
    variables: dict[str, str], processors: int
) -> None:
    program = [sys.executable, "-c", PINNED]

    run = subprocess.run(program, env=os.environ | variables, capture_output=True, text=True, check=True)

    assert run.stdout.split() == [str(processors), str(processors), "1"]


CONFINED = """
import os, torch
torch.ones(2**17).mul_(1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from mucudnn.backends.cpu.environment import usable_processors
print(len(usable_processors()))
"""


def test_a_program_that_confines_itself_is_believed() -> None:
    free = {name: value for name, value in os.environ.items() if name not in environment._PINNING_VARIABLES}

    run = subprocess.run([sys.executable, "-c", CONFINED], env=free, capture_output=True, check=True)

    assert run.stdout.split() == [b"1"]
