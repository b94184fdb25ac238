"""Blocks of images, transposed: every way is right, in a script and in Python's interpreter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms import turning
from mucudnn.algorithms.scripts import Script
from mucudnn.algorithms.turning import quickest, turn, ways_of
from tests.algorithms.allocations import allocated_bytes

WAYS = ("copies", "products", "library")

SHAPES = [
    (64, 784), (784, 64), (512, 49), (49, 512), (16, 400), (7, 9), (128, 1032), (1032, 128), (1, 8),
    (32, 2048),
]  # fmt: skip
"""Rows of the source and its columns: blocks of 8 rows, of 16 columns, and neither."""

turn_in_a_script = Script(turn)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_matrices_are_transposed(way: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    p, q = shape
    source = torch.randn(2, 3, p, q, dtype=dtype)
    target = torch.full((2, 3, q, p), torch.nan, dtype=dtype)

    turn_in_a_script(ways_of(dtype)[way], source, target)

    assert torch.equal(target, source.transpose(2, 3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_of_images_are_transposed_and_nothing_beside_them_is_touched(
    way: str, shape: tuple[int, int]
) -> None:
    p, q = shape
    source = torch.randn(2, 1, p, q + 5)[..., 2 : 2 + q]
    whole = torch.full((2, 1, q + 1, p + 7), -1.0)
    target = whole[:, :, :q, 3 : 3 + p]

    turn_in_a_script(ways_of(torch.float32)[way], source, target)

    assert torch.equal(target, source.transpose(2, 3))
    target.fill_(-1.0)
    assert bool((whole == -1.0).all())


def test_python_does_the_same_as_the_script() -> None:
    source = torch.randn(1, 1, 64, 400)
    for way in ways_of(torch.float32).values():
        target = torch.empty(1, 1, 400, 64)
        turn(way, source, target)
        assert torch.equal(target, source.transpose(2, 3))


@pytest.mark.parametrize("way", WAYS)
def test_strides_of_any_kind_are_right(way: str) -> None:
    for source in (
        torch.randn(1, 2, 64, 800)[..., ::2],
        torch.randn(1, 2, 400, 64).transpose(2, 3),
        torch.randn(1, 1, 1, 400).expand(2, 2, 64, 400),
    ):
        for target in (torch.empty(*source.shape[:2], 400, 64), torch.empty(*source.shape[:2], 400, 128)):
            turn_in_a_script(ways_of(torch.float32)[way], source, target[..., :: target.size(3) // 64])
            assert torch.equal(target[..., :: target.size(3) // 64], source.transpose(2, 3))


@pytest.fixture
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "_quickest", {})


def scratch(elements: int = 2**15) -> tuple[Tensor, Tensor]:
    return torch.full((elements,), torch.nan), torch.full((elements,), torch.nan)


@pytest.mark.usefixtures("nothing_tried")
def test_the_quickest_way_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def the_second_wins(*ways: Callable[[], None]) -> list[float]:
        calls.append(len(ways))
        for way in ways:
            way()
        return [2.0, 1.0, 3.0][: len(ways)]

    monkeypatch.setattr(turning, "quickest_of", the_second_wins)

    found = [quickest(scratch(), workers=1) for _ in range(2)]

    assert calls == [len(WAYS)]
    assert all(each.rows.numel() and not each.by_library for each in found)


@pytest.mark.usefixtures("nothing_tried")
def test_workers_never_wait_for_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick MKL would be: two threads that call it through Python wait for one another."""

    def the_last_wins(*ways: Callable[[], None]) -> list[float]:
        return [float(-place) for place in range(len(ways))]

    monkeypatch.setattr(turning, "quickest_of", the_last_wins)

    assert quickest(scratch(), workers=1).by_library
    assert not quickest(scratch(), workers=2).by_library


@pytest.mark.usefixtures("nothing_tried")
def test_memory_too_small_to_tell_decides_nothing() -> None:
    small = quickest(scratch(elements=100), workers=1)

    assert not small.by_library
    assert not small.rows.numel()
    assert not turning._quickest


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(64, 784), (64, 1032), (7, 9)], ids=str)
def test_nothing_is_allocated(way: str, shape: tuple[int, int]) -> None:
    p, q = shape
    chosen, source, target = ways_of(torch.float32)[way], torch.zeros(1, 1, p, q), torch.zeros(1, 1, q, p)

    assert allocated_bytes(lambda: turn(chosen, source, target)) == 0
