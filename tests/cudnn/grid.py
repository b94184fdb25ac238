"""Shapes and settings in which models have convolutions, and each of them in uneven parts of one engine."""

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.by_hand import is_compiled_when_run
from mucudnn.algorithms.base import memory_format
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.convolutions.calls import ConvArguments, own_call
from mucudnn.division import Division
from mucudnn.functional import DividedConvolution
from mucudnn.live.reference import relative_error
from mucudnn.problem import ConvOp, ConvProblem, Layout, problems_of
from mucudnn.profile import Candidate
from tests.kept import KeptResults
from tests.operands import a_convolution

SIZES = (7, 5, 4)
"""Of 16 samples."""


def _conv(rank: int, **changes: object) -> ConvProblem:
    """Return the convolution of 32 channels by 3 taps along each dimension, with changes."""
    given = {
        "batch": sum(SIZES),
        "in_channels": 32,
        "out_channels": 32,
        "input_size": (6, 10, 8)[-rank:],
        "kernel_size": (3,) * rank,
        "stride": (1,) * rank,
        "padding": (1,) * rank,
        "dilation": (1,) * rank,
    }
    return a_convolution(**{**given, **changes})


def _transposed(rank: int, **changes: object) -> ConvProblem:
    """Return the transposed convolution that doubles each dimension, as decoders have it."""
    doubling = {"op": ConvOp.DGRAD, "out_channels": 16, "kernel_size": (4,) * rank, "stride": (2,) * rank}
    return _conv(rank, **{**doubling, **changes})


SHAPES = {
    "plain": _conv(2, bias=True),
    # A sample has 594 bytes in 16 bits, so that parts begin at multiples of 2 bytes and no more.
    "first layer": _conv(
        2, in_channels=3, input_size=(9, 11), kernel_size=(7, 7), stride=(2, 2), padding=(3, 3)
    ),
    "pointwise": _conv(2, kernel_size=(1, 1), padding=(0, 0)),
    "dilated": _conv(2, dilation=(2, 3), padding=(2, 3)),
    "groups": _conv(2, groups=4, bias=True),
    "depthwise": _conv(2, groups=32),
    "1-D": _conv(1, bias=True),
    "3-D": _conv(3, bias=True),
    "3-D in groups": _conv(3, groups=4),
    "transposed": _transposed(2),
    "transposed in groups": _transposed(2, groups=4),
    "transposed 1-D": _transposed(1),
    "transposed 3-D": _transposed(3),
}
"""The forward pass of each."""

PRECISIONS = {
    "float32": ("float32", False),
    "TF32": ("float32", True),
    "float64": ("float64", False),
    "float16": ("float16", False),
    "bfloat16": ("bfloat16", False),
}
"""Types, and whether float32 may be multiplied in TF32."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A shape in a setting.

    Attributes:
        shape: its name.
        precision: its name.
        layout: of images and filters.
    """

    shape: str
    precision: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.shape}-{self.precision}-{self.layout}"

    @property
    def problem(self) -> ConvProblem:
        dtype, _ = PRECISIONS[self.precision]
        layouts = {"layout": self.layout, "filter_layout": self.layout}
        return dataclasses.replace(SHAPES[self.shape], dtype=dtype, **layouts)

    @property
    def allow_tf32(self) -> bool:
        return PRECISIONS[self.precision][1]


CELLS = [
    Cell(shape, precision, layout)
    for layout in Layout
    for precision in PRECISIONS
    for shape, problem in SHAPES.items()
    if layout is Layout.CONTIGUOUS or len(problem.input_size) > 1  # PyTorch has one layout of one dimension
]

FEW = [
    cell
    for cell in CELLS
    if (cell.precision, cell.layout) in (("float32", Layout.CONTIGUOUS), ("bfloat16", Layout.CHANNELS_LAST))
]
"""One setting in which parts of a weight gradient add up in it, and one in which they do so beside it."""


@dataclasses.dataclass
class Operands:
    """What a layer is called with, and the gradient of its result."""

    image: Tensor
    weight: Tensor
    bias: Tensor | None
    gradient: Tensor

    def renewed(self) -> None:
        """Take other values, in the same places."""
        for tensor in (self.image, self.weight, self.gradient):
            tensor.copy_(tensor.flip(0).neg())

    def in_float64(self) -> "Operands":
        bias = None if self.bias is None else self.bias.double()
        return Operands(self.image.double(), self.weight.double(), bias, self.gradient.double())

    def tensors(self) -> list[Tensor]:
        tensors = self.image, self.weight, self.bias, self.gradient
        return [tensor for tensor in tensors if tensor is not None]


def operands_for(problem: ConvProblem, device: torch.device) -> Operands:
    """Normal random values in the problem's type and layout."""
    generator = torch.Generator().manual_seed(0)
    order = memory_format(problem.layout, len(problem.input_shape))

    def normal(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator).to(device, getattr(torch, problem.dtype))
        return made.contiguous(memory_format=order) if len(shape) > 1 else made

    shapes = problem.input_shape, problem.output_shape
    image, result = shapes if problem.op is ConvOp.FPROP else reversed(shapes)
    bias = normal(problem.out_channels) if problem.bias else None
    return Operands(normal(*image), normal(*problem.filter_shape), bias, normal(*result))


Results = tuple[Tensor, ...]
"""Of a layer: y, dx, dw, and db if there is a bias."""


def results_of(layer: Callable[[Tensor, Tensor, Tensor | None], Tensor], given: Operands) -> Results:
    """Run a layer forward and, by autograd, backward."""
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_()
        for tensor in (given.image, given.weight, given.bias)
    ]
    y = layer(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return (y.detach(), *torch.autograd.grad(y, wanted, given.gradient))


def own_results(problem: ConvProblem, given: Operands) -> Results:
    """The same by PyTorch's own convolution."""
    return results_of(lambda *tensors: own_call(*tensors, ConvArguments.of_problem(problem)), given)


_EXACT, _OWN = (KeptResults[Results](2 * len(CELLS), 4) for _ in range(2))
"""Both layouts and each way of dividing are held to the same results."""


def divided(backend: CudnnBackend, problem: ConvProblem) -> DividedConvolution:
    """Return the layer in uneven parts of one engine for each op."""
    return DividedConvolution(
        backend, problem, {op: _division(backend, each) for op, each in problems_of(problem).items()}
    )


def _division(backend: CudnnBackend, problem: ConvProblem) -> Division:
    """Return the parts, of the first of cuDNN's engines that computes all their sizes.

    One that is compiled at run time, a second for each size, is only taken where there is no other.
    """
    parts = [problem.part(size) for size in SIZES]
    listed = backend.algorithms(parts[0])
    engines = [name for name in listed if name.startswith("cudnn:eng")]
    ready = (name for name in engines if not is_compiled_when_run(backend, parts[0], name))
    in_turn = itertools.chain(ready, engines)
    engine = next((name for name in in_turn if all(backend.computes(part, name) for part in parts)), None)
    assert engine is not None, f"cuDNN must list an engine for {problem}, but there are only {listed}."
    return Division(tuple(Candidate(engine, size, 0.0, 0) for size in SIZES))


def assert_right(backend: CudnnBackend, problem: ConvProblem, given: Operands, results: Results) -> None:
    """Hold results to those in float64 and to PyTorch's own, under the flags of the moment."""
    doubled, device = given.in_float64(), given.image.device
    plain = dataclasses.replace(
        problem, dtype="float64", layout=Layout.CONTIGUOUS, filter_layout=Layout.CONTIGUOUS
    )
    exact = _EXACT.of((plain, device), doubled.tensors(), lambda: own_results(problem, doubled))
    own = _OWN.of((problem, device, backend.flags()), given.tensors(), lambda: own_results(problem, given))
    forward, backward = problem.op, {ConvOp.FPROP: ConvOp.DGRAD, ConvOp.DGRAD: ConvOp.FPROP}[problem.op]
    ops = (forward, backward, ConvOp.WGRAD, forward)
    for op, ours, expected, theirs in zip(ops, results, exact, own, strict=False):
        bound = backend.error_bound(problems_of(problem)[op], "")
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert relative_error(ours, expected) <= bound, op
        assert relative_error(ours, theirs.double()) <= 2 * bound, op
    assert len(results) == len(exact)
