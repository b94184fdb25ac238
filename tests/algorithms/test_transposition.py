"""Transposed copies: right for all strides, every bit, with MKL and without it, and none of it slower."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.algorithms import transposition
from mucudnn.algorithms.scripts import Script
from mucudnn.algorithms.transposition import copy_by_torch, quickest_of, transpose

Shape = tuple[int, int, int]

UNTOUCHED = -1.0

SHAPES: list[Shape] = [
    (1, 64, 3136), (2, 3136, 64), (3, 72, 1024), (2, 1, 40), (2, 40, 1), (1, 1, 1), (5, 3, 300), (2, 300, 3),
    (0, 4, 4), (2, 0, 4), (2, 4, 0),
]  # fmt: skip


@pytest.fixture(params=["MKL", "torch"])
def who(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who copies: MKL where PyTorch has it, and torch."""
    is_mkl = request.param == "MKL"
    monkeypatch.setattr(transposition, "_is_library_quicker", lambda *_: is_mkl)
    return str(request.param)


def numbers(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


@pytest.mark.usefixtures("who")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dense_matrices_are_transposed(shape: Shape, dtype: torch.dtype) -> None:
    source = numbers(shape, dtype)
    target = torch.full((shape[0], shape[2], shape[1]), UNTOUCHED, dtype=dtype)

    transpose(source, target)

    assert torch.equal(target, source.transpose(1, 2))


@pytest.mark.usefixtures("who")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gap", [(3, 0, 0), (0, 5, 0), (0, 0, 2), (1, 2, 3)], ids=str)
def test_parts_of_larger_ones_are_transposed_and_nothing_beside_them_is_touched(
    shape: Shape, gap: Shape
) -> None:
    source = torch.full([n + g for n, g in zip(shape, gap, strict=True)], UNTOUCHED)
    source = source[: shape[0], : shape[1], : shape[2]].copy_(numbers(shape))
    whole = torch.full((shape[0] + gap[0], shape[2] + gap[1], shape[1] + gap[2]), UNTOUCHED)
    target = whole[: shape[0], : shape[2], : shape[1]]

    transpose(source, target)

    assert torch.equal(target, numbers(shape).transpose(1, 2))
    target.fill_(UNTOUCHED)
    assert bool((whole == UNTOUCHED).all())


@pytest.mark.usefixtures("who")
def test_strides_of_any_kind_are_right() -> None:
    target = torch.empty(2, 7, 5)
    for source in (
        numbers((2, 7, 5)).transpose(1, 2),
        numbers((5, 7, 2)).permute(2, 0, 1),
        numbers((1, 1, 7)).expand(2, 5, 7),
        numbers((2, 10, 14))[:, ::2, ::2],
    ):
        transpose(source, target)
        assert torch.equal(target, source.transpose(1, 2))


@pytest.mark.usefixtures("who")
def test_overlapping_rows_are_right() -> None:
    source = torch.arange(12.0).as_strided((1, 5, 7), (12, 1, 1))
    target = torch.empty(1, 7, 5)

    transpose(source, target)

    assert torch.equal(target, source.transpose(1, 2))


@pytest.mark.usefixtures("who")
@pytest.mark.parametrize(("dtype", "like"), [(torch.float32, torch.int32), (torch.float64, torch.int64)])
def test_every_bit_comes_over(dtype: torch.dtype, like: torch.dtype) -> None:
    limits = torch.iinfo(like)
    bits = torch.randint(limits.min, limits.max, (2, 33, 65), dtype=like)
    target = torch.empty((2, 65, 33), dtype=dtype)

    transpose(bits.view(dtype), target)

    assert torch.equal(target.view(like), bits.transpose(1, 2))


def test_negative_views_are_right() -> None:
    source = torch._neg_view(numbers((1, 4, 5)))
    target = torch.empty(1, 5, 4)

    transpose(source, target)

    assert torch.equal(target, -numbers((1, 4, 5)).transpose(1, 2))


def test_another_type_is_converted() -> None:
    target = torch.empty((2, 5, 4), dtype=torch.float64)

    transpose(numbers((2, 4, 5)), target)

    assert torch.equal(target, numbers((2, 4, 5), torch.float64).transpose(1, 2))


def test_mkl_is_there_where_torch_has_it() -> None:
    """On x86 PyTorch's builds do; a name that changes would make copies slow without a word."""
    assert bool(transposition._copies_of_mkl()) == torch.backends.mkl.is_available()


class _Copies(TorchDispatchMode):
    """Keeps the shapes of all that is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shape", "step", "blocks"),
    [
        ((2, 20, 1024), 1024, [(2, 1024, 8), (2, 1024, 8), (2, 1024, 4)]),  # 4 KiB from row to row: one set
        ((2, 36, 500), 512, [(2, 500, 16), (2, 500, 16), (2, 500, 4)]),  # 2 KiB: two sets
        ((2, 40, 250), 256, [(2, 250, 40)]),  # 1 KiB: no gain
        ((2, 784, 16), 16, [(2, 16, 784)]),
    ],
    ids=str,
)
def test_torch_copies_as_many_rows_at_once_as_the_cache_holds_lines(
    shape: Shape, step: int, blocks: list[Shape]
) -> None:
    source = torch.empty(*shape[:2], step)[..., : shape[2]]
    with _Copies() as seen:
        copy_by_torch(source, torch.empty(shape[0], shape[2], shape[1]))

    assert seen.shapes == blocks


def test_mkl_is_asked_only_where_it_was_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors of other makes than Intel's it copies element by element."""
    source, target = numbers((1, 128, 256)), torch.empty(1, 256, 128)
    for seconds in ([1.0, 2.0], [2.0, 1.0]):
        tried = []
        monkeypatch.setattr(transposition, "_library_is_quicker", {})
        monkeypatch.setattr(transposition, "quickest_of", lambda *ways: tried.append(ways) or seconds)  # noqa: B023  # it is called here
        with _Copies() as seen:
            for _ in range(2):
                transpose(source, target)
        has_mkl = bool(transposition._copies_of_mkl())
        assert len(tried) == has_mkl
        assert bool(seen.shapes) == (not has_mkl or seconds[0] > seconds[1])
        assert torch.equal(target, source.transpose(1, 2))


def test_the_first_large_copy_tries_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transposition, "_library_is_quicker", {})
    for shape, tried in (((1, 8, 9), 0), ((9, 3, 5000), 0), ((2, 64, 300), 1), ((2, 64, 300), 1)):
        source, target = numbers(shape), torch.empty(shape[0], shape[2], shape[1])
        transpose(source, target)
        assert torch.equal(target, source.transpose(1, 2))
        assert len(transposition._library_is_quicker) == tried * bool(transposition._copies_of_mkl())


def test_the_quickest_way_is_found_by_trying() -> None:
    slow, quick = quickest_of(lambda: time.sleep(0.02), lambda: None)

    assert quick < slow < 10


@Script
def _transposed_twice(source: Tensor, middle: Tensor, target: Tensor) -> None:
    transpose(source, middle)
    transpose(middle, target)


def test_scripts_call_it() -> None:
    source = numbers((2, 30, 50))
    target = torch.empty_like(source)

    _transposed_twice(source, torch.empty(2, 50, 30), target)

    assert torch.equal(target, source)
