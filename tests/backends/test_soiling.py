"""Memory that nobody has written to, and what is found in it."""

import pytest
import torch
from torch import Tensor

from mucudnn.backends.cpu.soiling import soiled_memory

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
    with soiled_memory():
        assert is_soiled()
        assert not torch.zeros(SIZE).any()
    assert not is_soiled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_large_numbers_lie_in_it(dtype: torch.dtype) -> None:
    with soiled_memory():
        assert float(handed_out(dtype).min()) > 3e38


@pytest.mark.parametrize(("said", "is_asked_for"), [("128", True), ("0", False), ("much", False)])
def test_afterwards_it_is_as_the_environment_says(
    said: str, is_asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_PERTURB_", said)
    with soiled_memory():
        pass
    seen = is_soiled()
    monkeypatch.delenv("MALLOC_PERTURB_")
    with soiled_memory():
        pass

    assert seen is is_asked_for
    assert not is_soiled()


def test_a_c_library_without_the_switch_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.backends.cpu.soiling.ctypes.CDLL", lambda _: object())
    with soiled_memory():
        assert not is_soiled()
