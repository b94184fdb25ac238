"""Memory that nobody has written to, and what is found in it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from mucudnn.backends.cpu import soiling
from mucudnn.backends.cpu.soiling import soiled_memory
from tests.forks import in_a_child

CPU = torch.device("cpu")
SIZE = 2**14
SOIL = 0x7F


def handed_out(dtype: torch.dtype = torch.uint8) -> Tensor:
    """Unwritten memory in many pieces, some of which held zeros before they were given back."""
    held = [torch.zeros(SIZE, dtype=dtype) for _ in range(8)]
    del held
    return torch.stack([torch.empty(SIZE, dtype=dtype) for _ in range(64)])


def is_soiled() -> bool:
    return bool((handed_out() == SOIL).all())


def test_memory_is_soiled_for_a_while() -> None:
    with soiled_memory(CPU):
        assert is_soiled()
        assert not torch.zeros(SIZE).any()
    assert not is_soiled()


def test_for_another_device_it_is_left_alone() -> None:
    with soiled_memory(torch.device("cuda", 0)):
        assert not is_soiled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_large_numbers_lie_in_it(dtype: torch.dtype) -> None:
    with soiled_memory(CPU):
        assert float(handed_out(dtype).min()) > 3e38


def test_it_stays_soiled_until_the_last_one_leaves() -> None:
    with soiled_memory(CPU):
        with soiled_memory(CPU):
            pass
        assert is_soiled()
    assert not is_soiled()


@pytest.mark.usefixtures("one_thread")  # a child has none of the threads of its parent
def test_a_child_forked_while_another_thread_has_it_soiled_finds_it_as_it_was() -> None:
    with soiled_memory(CPU), ThreadPoolExecutor(1) as thread:
        assert thread.submit(in_a_child, lambda: not is_soiled()).result()
        assert is_soiled()


@pytest.mark.usefixtures("one_thread")
def test_a_child_forked_while_another_thread_leaves_finds_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hesitate(option: int, value: int) -> int:
        leaving.set()
        time.sleep(0.2)
        return mallopt(option, value)

    def leave() -> None:
        inside.__exit__(None, None, None)

    leaving, mallopt, inside = threading.Event(), soiling._mallopt(), soiled_memory(CPU)
    inside.__enter__()
    monkeypatch.setattr(soiling, "_mallopt", lambda: hesitate)
    with ThreadPoolExecutor(1) as thread:
        left = thread.submit(leave)
        leaving.wait()
        assert in_a_child(lambda: not is_soiled())
        left.result()


@pytest.mark.usefixtures("one_thread")  # a child has none of the threads of its parent
def test_a_child_forked_within_leaves_it_as_it_was() -> None:
    def leave_and_look() -> bool:
        inside.__exit__(None, None, None)
        return not is_soiled()

    inside = soiled_memory(CPU)
    with inside:
        assert in_a_child(leave_and_look)


@pytest.mark.parametrize(
    ("variable", "said", "is_asked_for"),
    [
        ("MALLOC_PERTURB_", "128", True),
        ("MALLOC_PERTURB_", "0x80", True),
        ("MALLOC_PERTURB_", "0", False),
        ("MALLOC_PERTURB_", "much", False),
        ("GLIBC_TUNABLES", "glibc.malloc.top_pad=0:glibc.malloc.perturb=128", True),
        ("GLIBC_TUNABLES", "glibc.malloc.top_pad=128", False),
    ],
)
def test_afterwards_it_is_as_the_environment_says(
    variable: str, said: str, is_asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, said)
    with soiled_memory(CPU):
        pass
    seen = is_soiled()
    monkeypatch.delenv(variable)
    with soiled_memory(CPU):
        pass

    assert seen is is_asked_for
    assert not is_soiled()


def test_a_c_library_without_the_switch_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.backends.cpu.soiling.ctypes.CDLL", lambda _: object())
    monkeypatch.setattr(soiling, "_mallopt", soiling._mallopt.__wrapped__)
    with soiled_memory(CPU):
        assert not is_soiled()
