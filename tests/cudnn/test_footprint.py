"""What a job takes from an allocator, which is here a ledger, beside operands and result."""

import contextlib

import pytest
import torch

from mucudnn.backends.cudnn.footprint import check_counts, taken_bytes
from mucudnn.backends.failures import is_lack_of_memory
from mucudnn.errors import UnmeasuredError
from tests.cudnn.ledgers import Blind, Ledger, Prepared, Result, Work


class Frugal(Work):
    """Work that makes do with less when it is refused what it wants."""

    def run(self) -> "Result":
        with contextlib.suppress(torch.OutOfMemoryError):
            return super().run()
        return Result(self._ledger)


class Adapting(Work):
    """Work that remembers what it was refused, and asks for little from then on, as PyTorch's own does."""

    has_adapted = False

    def run(self) -> "Result":
        if not self.has_adapted:
            with contextlib.suppress(torch.OutOfMemoryError):
                return super().run()
            self.has_adapted = True
        return Result(self._ledger)


class WithoutAnyPlan(Work):
    """Work that finds no way within what it is allowed, and says so in words of its own."""

    def run(self) -> "Result":
        try:
            return super().run()
        except torch.OutOfMemoryError:
            raise RuntimeError("GET was unable to find an engine to execute this computation") from None


class OnASlice(Work):
    """Work that an allocator refuses memory by an assertion of its own, which it does not count."""

    def run(self) -> "Result":
        refused = self._ledger.refused
        try:
            return super().run()
        except torch.OutOfMemoryError:
            self._ledger.refused = refused
            raise RuntimeError(
                'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":1154'
            ) from None


@pytest.mark.parametrize(
    ("text", "is_lack"),
    [
        ("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be reported at some other call", True),
        ("an illegal memory access\nframe #1: c10::cuda::CUDACachingAllocator::Native", False),
    ],
)
def test_lack_of_memory_is_told_by_the_first_line(text: str, is_lack: bool) -> None:
    assert is_lack_of_memory(RuntimeError(text)) is is_lack


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def taken(ledger: Ledger, work: Work, limit_bytes: int) -> int | None:
    return taken_bytes(Prepared("", {}, work), limit_bytes, ledger)


def test_operands_and_result_are_no_workspace(ledger: Ledger) -> None:
    assert taken(ledger, Work(ledger, [500, 500]), 10_000) == 500


def test_what_the_first_run_of_a_kind_takes_for_good_does_not_count(ledger: Ledger) -> None:
    assert taken(ledger, Work(ledger, [900, 500]), 10_000) == 500


def test_work_that_is_refused_memory_is_above_the_limit(ledger: Ledger) -> None:
    assert taken(ledger, Work(ledger, [500, 500]), 499 - 28) is None


def test_work_above_the_limit_that_the_allocator_let_pass_tells_what_it_takes(ledger: Ledger) -> None:
    # A result of 100 bytes of which 128 are taken leaves 28 bytes of slack in the cap, never the reverse.
    ledger.held_to = lambda _: contextlib.nullcontext()  # type: ignore[method-assign]

    assert taken(ledger, Work(ledger, [500, 500]), 499) == 500


def test_work_that_made_do_with_less_is_above_the_limit_for_it_will_want_more_later(ledger: Ledger) -> None:
    assert taken(ledger, Frugal(ledger, [500, 500]), 400) is None


def test_work_that_has_adapted_to_the_limit_is_above_it_however_little_it_takes_now(ledger: Ledger) -> None:
    assert taken(ledger, Adapting(ledger, [500, 500]), 400) is None


def test_work_that_finds_no_way_for_lack_of_memory_is_above_the_limit(ledger: Ledger) -> None:
    assert taken(ledger, WithoutAnyPlan(ledger, [500, 500]), 400) is None


@pytest.mark.parametrize("work", [Work, Frugal, WithoutAnyPlan, OnASlice])
def test_work_that_a_full_card_refuses_memory_says_nothing_of_the_limit(work: type[Work]) -> None:
    full = Ledger(size=1400)

    with pytest.raises(torch.OutOfMemoryError):
        taken(full, work(full, [500, 500]), 10_000)

    assert full.taken == 1000
    assert taken(full, work(full, [500, 500]), 250) is None  # there is as much


def test_work_that_a_full_card_has_room_for_takes_what_it_takes() -> None:
    full = Ledger(size=1700)

    assert taken(full, Work(full, [500, 500]), 10_000) == 500


def test_work_that_a_slice_of_a_card_refuses_memory_is_above_the_limit(ledger: Ledger) -> None:
    assert taken(ledger, OnASlice(ledger, [500, 500]), 400) is None


def test_work_that_fails_for_another_reason_fails(ledger: Ledger) -> None:
    with pytest.raises(StopIteration):
        taken(ledger, Work(ledger, []), 400)


def test_the_allocator_is_free_again_afterwards(ledger: Ledger) -> None:
    taken(ledger, Work(ledger, [500, 500]), 10_000)

    assert ledger.cap == 2**62
    assert ledger.taken == 1000


def test_an_allocator_that_counts_is_known_by_what_it_tells_of_a_known_piece(ledger: Ledger) -> None:
    check_counts(ledger)

    assert ledger.taken == 1000


def test_an_allocator_that_does_not_count_is_told_of_with_a_remedy() -> None:
    blind = Blind()

    with pytest.raises(
        UnmeasuredError,
        match=r"must count .* but of 16777216 bytes told 0, so .*"
        r"leave backend:cudaMallocAsync out .* PYTORCH_NO_CUDA_MEMORY_CACHING unset",
    ):
        check_counts(blind)
    assert blind.taken == 1000
