"""Convolutions of any code, divided where they are called."""

import copy
import itertools
import pickle
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

import mucudnn
from mucudnn.autotuning import Autotune, autotune
from mucudnn.errors import (
    BackendError,
    InfeasibleError,
    OptionError,
    PlanError,
    UnmeasuredError,
    UntunedWarning,
    UnweighableError,
)
from mucudnn.functional import DividedConvolution
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvOp
from tests.divided import is_divided
from tests.forks import in_a_child

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = "64MiB"
OWN = "cpu:aten"
BOUND = 1e-4
"""Of a largest difference in float32, relative to the largest number."""


def tensors(*shape: int, weight: tuple[int, ...] = (8, 4, 3, 3)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(each, generator=generator) for each in (shape, weight))
    return x.requires_grad_(), w.requires_grad_()


@pytest.fixture
def tuned(tmp_path: Path) -> Autotune:
    """A context with a store of its own."""
    return autotune(LIMIT, store=tmp_path / "store", progress=False)


def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with everything that is measured from now on."""
    seen: list[int] = []
    own = LiveMeasurer.measure
    monkeypatch.setattr(
        LiveMeasurer,
        "measure",
        lambda *args: (seen.append(1), own(*args))[1],  # type: ignore[func-returns-value]
    )
    return seen


def assert_close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=BOUND * max(expected.abs().max().item(), 1.0))


def assert_same(result: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    assert_close(result, expected)
    assert result.stride() == expected.stride()
    found, wanted = (torch.autograd.grad(y.square().sum(), leaves) for y in (result, expected))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


@pytest.mark.usefixtures("divided_by_hand")
def test_a_forked_child_computes_as_if_there_were_no_context(tuned: Autotune) -> None:
    x, w = tensors(8, 4, 8, 8)

    with tuned:
        in_parent = is_divided(F.conv2d(x, w))
        as_before = in_a_child(lambda: warned_of_a_fork(lambda: not is_divided(F.conv2d(x, w))))

    assert (in_parent, as_before) == (True, True)


def warned_of_a_fork(run: Callable[[], bool]) -> bool:
    with pytest.warns(UntunedWarning, match="A convolution is called in a forked process"):
        return run()


@pytest.mark.usefixtures("divided_by_hand")
def test_a_function_is_divided_inside_and_not_outside(tuned: Autotune) -> None:
    x, w = tensors(8, 4, 8, 8)
    expected = F.conv2d(x, w, padding=1)

    with tuned:
        result = F.conv2d(x, w, padding=1)

    assert_same(result, expected, x, w)
    assert {site.op for site in tuned.plan.sites} == {*ConvOp}
    assert {site.path for site in tuned.plan.sites} == {"conv2d"}
    assert OWN not in {part.algorithm for division in tuned.plan.sites.values() for part in division.parts}
    assert is_divided(result)
    assert torch.equal(F.conv2d(x, w, padding=1), expected)


class Tuned(nn.Module):
    """A model that enters a context of its own."""

    def __init__(self, context: Autotune) -> None:
        super().__init__()
        self.context = context
        self.weight = nn.Parameter(tensors(1)[1].detach())

    def forward(self, images: Tensor) -> Tensor:
        """Return the convolution."""
        with self.context:
            return F.conv2d(images, self.weight)


@pytest.mark.usefixtures("divided_by_hand")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_a_context_has_one_that_begins_anew(
    copied: Callable[[nn.Module], Tuned], tuned: Autotune
) -> None:
    x, _ = tensors(8, 4, 8, 8)
    model = Tuned(tuned)
    expected = model(x)

    with tuned:
        twin = copied(model)

    with pytest.raises(PlanError, match="none was"):
        _ = twin.context.plan
    result = twin(x)
    assert is_divided(result)
    assert torch.equal(result, expected)
    assert twin.context.plan == tuned.plan
    assert twin.context is not tuned


@pytest.mark.usefixtures("divided_by_hand")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_function_gives_what_it_gives_outside(rank: int, tuned: Autotune) -> None:
    x, w = tensors(4, 4, *(6,) * rank, weight=(4, 4, *(3,) * rank))
    bias = torch.ones(4, requires_grad=True)
    plain, transposed = getattr(F, f"conv{rank}d"), getattr(F, f"conv_transpose{rank}d")
    calls = [
        lambda: plain(x, w, bias, 1, 1),
        lambda: plain(x, w, bias=bias, padding="same"),
        lambda: plain(x[0], w),
        lambda: transposed(x, w, bias, stride=2, output_padding=1),
        lambda: transposed(x, w, dilation=2),
    ]

    for call in calls:
        with tuned:
            result = call()
        assert is_divided(result)
        assert_same(result, call(), x, w)


@pytest.mark.usefixtures("divided_by_hand")
def test_the_plan_says_which_functions_are_transposed(tuned: Autotune) -> None:
    x, w = tensors(4, 4, 6, 6, weight=(4, 4, 3, 3))
    with tuned:
        for call in (F.conv2d, F.conv_transpose2d, F.conv_transpose2d):
            call(x, w)
            call(x[..., 1:], w)

    assert tuned.plan.transposed == ("conv_transpose2d",)


def test_a_model_that_is_tuned_inside_is_measured_as_outside(tuned: Autotune, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    with tuned:
        mucudnn.optimize(model, LIMIT, torch.ones(4, 3, 8, 8), store=tmp_path / "model", progress=False)

    with pytest.raises(PlanError, match="but none was"):
        _ = tuned.plan


_OWN = {
    "conv2d": torch.ops.aten.conv2d.default,
    "conv_transpose2d": torch.ops.aten.conv_transpose2d.input,
}


@pytest.mark.parametrize("name", _OWN)
def test_what_is_known_is_not_measured_again(
    name: str, tuned: Autotune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a single image, if it is small, PyTorch computes a transposed convolution by another kernel."""
    x, w = tensors(8, 4, 8, 8, weight=(4, 4, 3, 3))
    convolve = getattr(F, name)
    with tuned:
        convolve(x, w)
        seen = measured(monkeypatch)
        for batch in (8, 5, 1):
            assert_close(convolve(x[:batch], w), _OWN[name](x[:batch], w))
        assert not seen
        convolve(x[..., 1:], w)
        assert seen


def test_gradients_are_tuned_when_they_are_first_needed(tuned: Autotune) -> None:
    x, w = tensors(4, 4, 8, 8)

    with tuned, torch.no_grad():
        F.conv2d(x, w)
    assert {site.op for site in tuned.plan.sites} == {ConvOp.FPROP}
    with tuned:
        F.conv2d(x.detach(), w)

    assert {site.op for site in tuned.plan.sites} == {ConvOp.FPROP, ConvOp.WGRAD}


def test_modules_and_compositions_are_seen_too(tuned: Autotune) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(self.conv(x), self.conv.weight)

    model, (x, _) = Own(), tensors(4, 4, 8, 8)
    with tuned:
        result = model(x)

    assert_same(result, model(x), x, *model.parameters())
    assert len({site.variant for site in tuned.plan.sites}) == 2


def test_contexts_may_be_entered_again_and_within_one_another(tuned: Autotune, tmp_path: Path) -> None:
    inner = autotune("512KiB", store=tmp_path / "other", progress=False)
    x, w = tensors(4, 4, 8, 8)
    expected = F.conv2d(x, w)

    with tuned, tuned, inner:
        result = F.conv2d(x, w)

    assert_close(result, expected)
    assert len(inner.plan.sites) == 3
    with pytest.raises(PlanError, match="but none was"):
        _ = tuned.plan


def test_threads_tune_one_after_the_other_and_get_the_same(tuned: Autotune) -> None:
    x, w = tensors(4, 4, 8, 8)
    results: list[Tensor] = []

    def call() -> None:
        with tuned:
            results.append(F.conv2d(x, w))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 3
    assert len(tuned.plan.sites) == 3
    for result in results:
        assert_close(result, torch.ops.aten.conv2d(x, w))


def test_threads_that_do_not_enter_are_outside(tuned: Autotune) -> None:
    x, w = tensors(4, 4, 8, 8)
    with tuned:
        thread = threading.Thread(target=lambda: F.conv2d(x, w))
        thread.start()
        thread.join()

    with pytest.raises(PlanError, match="but none was"):
        _ = tuned.plan


def test_under_autocast_the_type_is_that_of_autocast(tuned: Autotune) -> None:
    x, w = tensors(4, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with tuned:
            result = F.conv2d(x, w)
        expected = F.conv2d(x, w)

    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=3e-2, atol=3e-2)
    assert {assigned.problem.dtype for assigned in tuned.plan.assignments} == {"bfloat16"}


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(x.to(torch.complex64), w.to(torch.complex64)),
        lambda x, w: F.conv2d(x[:0], w),
        lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), dilation=2, output_padding=1),
        lambda x, w: torch.func.vmap(lambda one: F.conv2d(one, w))(x[None]),
        lambda x, w: F.conv2d(x.to("meta"), w.to("meta")),
    ],
)
def test_what_cannot_be_divided_runs_as_before(call: Any, tuned: Autotune) -> None:
    x, w = (each.detach() for each in tensors(4, 4, 8, 8))
    expected = call(x, w)

    with tuned, warnings.catch_warnings():
        warnings.simplefilter("error")
        result = call(x, w)

    assert result.is_meta or torch.equal(result, expected)
    with pytest.raises(PlanError, match="but none was"):
        _ = tuned.plan


def test_pytorchs_errors_are_its_own(tuned: Autotune) -> None:
    x, w = tensors(4, 4, 8, 8)
    with tuned:
        with pytest.raises(RuntimeError, match="to have 4 channels"):
            F.conv2d(x[:, :3], w)
        with pytest.raises(TypeError):
            F.conv2d(x, w, wrong=1)  # type: ignore[call-overload]
        with pytest.raises(RuntimeError, match="padding='same' is not supported for strided"):
            F.conv2d(x, w, stride=2, padding="same")
        with pytest.raises(TypeError):
            F.conv2d(x, None)  # type: ignore[call-overload]
        with pytest.raises(RuntimeError, match="expected bias to be 1-dimensional with 8 elements"):
            F.conv2d(x, w, torch.ones(1))
        with pytest.raises(RuntimeError, match="expected stride to be a single integer value or a list of 2"):
            F.conv_transpose2d(x, w.transpose(0, 1), stride=(1, 1, 1))


@pytest.mark.parametrize(("rank", "other"), [*itertools.permutations((1, 2, 3), 2)])
@pytest.mark.parametrize("name", ["conv", "conv_transpose"])
def test_a_filter_of_other_dimensions_is_an_error_as_outside(
    name: str, rank: int, other: int, tuned: Autotune
) -> None:
    function = getattr(F, f"{name}{rank}d")
    x, w = torch.ones(2, 3, *(8,) * other), torch.ones(3, 3, *(3,) * other)

    with pytest.raises(RuntimeError, match=r"[Ee]xpected"), tuned:
        function(x, w)


def test_a_smaller_batch_that_needs_more_than_the_limit_runs_pytorchs_own(
    tuned: Autotune, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = (each.detach() for each in tensors(4, 4, 8, 8))
    greedy = {ConvOp.FPROP: 2**40, ConvOp.DGRAD: 0, ConvOp.WGRAD: 0}
    with tuned:
        F.conv2d(x, w)
        made = DividedConvolution.__init__

        def make(self: DividedConvolution, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            self.buffer_bytes = greedy

        monkeypatch.setattr(DividedConvolution, "__init__", make)
        monkeypatch.setattr(DividedConvolution, "__call__", lambda *_: pytest.fail("it needs too much"))
        with pytest.warns(
            UntunedWarning, match=r"needs 1099511627776 bytes .*once for this autotune"
        ) as told:
            results = [F.conv2d(x[:samples], w) for samples in (3, 2)]

    assert len(told) == 1
    for result, samples in zip(results, (3, 2), strict=True):
        assert torch.equal(result, torch.ops.aten.conv2d(x[:samples], w))


def test_what_was_tuned_for_other_threads_is_tuned_again(tuned: Autotune) -> None:
    x, w = (each.detach() for each in tensors(4, 4, 8, 8))
    with tuned:
        F.conv2d(x, w)
        torch.set_num_threads(2)  # the fixture sets it back
        F.conv2d(x, w)

    with pytest.raises(PlanError, match="tuned in several"):
        _ = tuned.plan


def test_a_limit_that_nothing_fits_says_so(tmp_path: Path) -> None:
    x, w = (torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3))
    with (
        pytest.raises(InfeasibleError, match="conv2d fprop"),
        autotune(0, store=tmp_path / "store", progress=False),
    ):
        F.conv2d(x, w)


def test_a_total_cannot_be_shared_by_convolutions_that_are_not_known_yet() -> None:
    with pytest.raises(OptionError, match="must have the mode 'reuse'"):
        mucudnn.autotune(LIMIT, mode="sharing")
    with pytest.raises(OptionError, match="a recording"):
        mucudnn.autotune(LIMIT, backend="replay:file")
    with pytest.raises(mucudnn.errors.SizeError):
        mucudnn.autotune("64")


@pytest.mark.parametrize(("kind", "times"), [(UnmeasuredError, 3), (UnweighableError, 1)])
def test_a_call_that_cannot_be_measured_stays_as_it_is_and_is_not_tried_again(
    tuned: Autotune, monkeypatch: pytest.MonkeyPatch, kind: type[BackendError], times: int
) -> None:
    tried: list[int] = []

    def lacking(*_: Any) -> Any:
        tried.append(1)
        raise kind("memory is lacking")

    monkeypatch.setattr(LiveMeasurer, "measure", lacking)
    x, w = tensors(4, 4, 8, 8)

    with pytest.warns(UntunedWarning, match="memory is lacking"), tuned:
        results = [F.conv2d(x, w) for _ in range(3)]

    assert all(torch.equal(result, F.conv2d(x, w)) for result in results)
    assert len(tried) == times  # in the first call: the forward pass and both gradients, or none after it


def test_a_function_may_be_decorated(tmp_path: Path) -> None:
    tuned = mucudnn.autotune(LIMIT, policy="undivided", store=tmp_path / "store", progress=False)

    @tuned
    def convolve(image: Tensor, weight: Tensor) -> Tensor:
        """Convolve."""
        return nn.functional.conv2d(image, weight)

    image, weight = torch.randn(4, 3, 8, 8), torch.randn(5, 3, 3, 3)
    results = [convolve(image, weight) for _ in range(2)]

    assert convolve.__doc__ == "Convolve."
    assert len(tuned.plan.sites) == 1
    for result in results:
        torch.testing.assert_close(result, nn.functional.conv2d(image, weight))


def _yields(image: Tensor, weight: Tensor) -> Iterator[Tensor]:
    yield nn.functional.conv2d(image, weight)


async def _waits(image: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.conv2d(image, weight)


async def _waits_and_yields(image: Tensor, weight: Tensor) -> AsyncIterator[Tensor]:
    yield nn.functional.conv2d(image, weight)


class _Waiting:
    """An object that is called, and computes later."""

    async def __call__(self, image: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.conv2d(image, weight)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (_Waiting(), "coroutine function '<.*_Waiting object at .*>'"),
        (_yields, "generator function '_yields'"),
        (_waits, "coroutine function '_waits'"),
        (_waits_and_yields, "asynchronous generator function '_waits_and_yields'"),
        (nn.Conv2d, "class 'Conv2d'"),
    ],
)
def test_what_computes_after_its_call_cannot_be_decorated(
    function: Callable[..., object], what: str, tuned: Autotune
) -> None:
    with pytest.raises(OptionError, match=f"must compute while it is called, but got the {what}"):
        tuned(function)


def test_a_graph_that_is_traced_holds_the_convolutions_alone(tuned: Autotune) -> None:
    def both(image: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return F.conv2d(image, weight, padding=1), F.conv_transpose2d(image, weight)

    with tuned:
        traced = torch.fx.symbolic_trace(both)

    assert len(traced.graph.nodes) == len(torch.fx.symbolic_trace(both).graph.nodes) == 5
