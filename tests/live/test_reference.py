"""What results are compared with: the definition of a convolution, in little memory."""

import dataclasses
import gc
import math

import pytest
import torch

from mucudnn.backends import Job, backend_of
from mucudnn.choices import Policy
from mucudnn.live.reference import Reference, convolve_sample
from mucudnn.problem import ConvOp, ConvProblem
from tests.contracts.problems import PROBLEMS
from tests.operands import a_convolution, operands_of, reference, relative_error, small_integers
from tests.work import Work

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {
    **{name: dataclasses.replace(problem, batch=1, dtype="float64") for name, problem in PROBLEMS.items()},
    "depthwise": a_convolution(batch=1, in_channels=4, out_channels=8, groups=4, dtype="float64"),
    "all at once": a_convolution(
        batch=1, in_channels=4, out_channels=2, input_size=(13, 12), kernel_size=(3, 2), stride=(2, 3),
        padding=(0, 4), dilation=(3, 2), groups=2, dtype="float64",
    ),
    "rows that no window meets": a_convolution(batch=1, input_size=(9, 12), stride=(3, 5), dtype="float64"),
}  # fmt: skip

LARGE = a_convolution(
    batch=1, in_channels=64, out_channels=64, input_size=(96, 96), kernel_size=(5, 5), padding=(2, 2),
    dtype="float64",
)  # fmt: skip


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("problem", EXACT.values(), ids=EXACT)
def test_it_is_the_convolution_that_pytorch_computes_exactly(problem: ConvProblem, op: ConvOp) -> None:
    problem = problem.with_op(op)
    operands = operands_of(problem, small_integers)

    result = convolve_sample(problem, *operands)

    assert result.dtype is torch.float64
    assert torch.equal(result, reference(problem, *operands))


@pytest.mark.parametrize("op", ConvOp)
def test_it_is_as_exact_as_float64(op: ConvOp) -> None:
    problem = LARGE.with_op(op)
    operands = operands_of(problem)

    error = relative_error(convolve_sample(problem, *operands), reference(problem, *operands))
    assert error <= 2 * math.sqrt(problem.terms) * 2**-53  # of both, as roundings add up


SUMMED = a_convolution(batch=12, in_channels=3, out_channels=5).with_op(ConvOp.WGRAD)


def a_reference(problem: ConvProblem) -> Reference:
    first, second, bias = operands_of(problem)
    return Reference(backend_of("cpu:"), problem, (first, second, bias), torch.empty(problem.filter_shape))


def stretches(policy: Policy) -> list[slice]:
    """What is asked for in tuning: from the first sample on, and from a less aligned one."""
    sizes = [size for size in policy.sizes(SUMMED.batch) if 2 * size <= SUMMED.batch]
    return [slice(start, start + size) for size in sizes for start in (0, size, 0)] + [slice(0, SUMMED.batch)]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("policy", [Policy.ALL, Policy.POWER_OF_TWO])
def test_gradients_of_any_stretches_are_sums_of_their_samples(policy: Policy, *, backwards: bool) -> None:
    asked, whole = stretches(policy), a_reference(SUMMED)
    first, second, bias = operands_of(SUMMED)

    for here in reversed(asked) if backwards else asked:
        part = SUMMED.part(here.stop - here.start)
        expected = reference(part, first[here], second[here], bias)
        assert relative_error(whole.of(here), expected) <= 1e-14


def test_stretches_from_the_first_sample_on_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, whole = [], a_reference(SUMMED)
    monkeypatch.setattr(
        "mucudnn.live.reference.convolve_sample",
        lambda *operands: computed.append(operands[0]) or convolve_sample(*operands),
    )

    for here in stretches(Policy.ALL):
        if here.start == 0:
            whole.of(here)

    assert len(computed) == SUMMED.batch


def test_however_many_sizes_are_tried_two_gradients_are_kept() -> None:
    whole = a_reference(SUMMED)
    gc.collect()
    before = gradients_in_memory()
    for here in stretches(Policy.ALL):
        whole.of(here)
    gc.collect()

    assert gradients_in_memory() - before <= 2


def gradients_in_memory() -> int:
    tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
    return sum(each.shape == SUMMED.filter_shape and each.dtype is torch.float64 for each in tensors)


def one_sample(payload: dict[str, str]) -> Work:
    problem = LARGE.with_op(ConvOp(payload["op"]))
    operands = operands_of(problem)
    result = convolve_sample(problem, *operands)
    return Work(lambda: convolve_sample(problem, *operands), result.nbytes)


@pytest.mark.parametrize("op", ConvOp)
def test_it_takes_no_more_than_three_samples_and_two_filters(op: ConvOp) -> None:
    job = Job("tests.live.test_reference:one_sample", {"op": op.value})

    seen = backend_of("cpu:").footprint(job, limit_bytes=2**40)

    sample_bytes = 64 * 96 * 96 * 8
    assert seen is not None
    assert sample_bytes < seen < 3 * sample_bytes + 2 * LARGE.filter_bytes
