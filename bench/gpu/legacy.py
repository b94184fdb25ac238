"""Workspaces of the legacy API's algorithms beside those of the plans for the same problem."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from bench.gpu.layers import Case, all_cases
from bench.gpu.sections import Cut, Task, only
from bench.gpu.values import Answer
from mucudnn.backends.cudnn.configurations import EngineConfiguration
from mucudnn.backends.cudnn.constants import ConvolutionMode, DataType
from mucudnn.backends.cudnn.graph import tensor_layouts
from mucudnn.backends.cudnn.library import Library
from mucudnn.problem import ConvOp, ConvProblem, Layout

_DATA_TYPES = {"float32": DataType.FLOAT, "float16": DataType.HALF, "bfloat16": DataType.BFLOAT16}
_FILTER_FORMATS = {Layout.CONTIGUOUS: 0, Layout.CHANNELS_LAST: 1}
_DEFAULT_MATH, _TENSOR_OP_MATH = 0, 1

ALGORITHMS = {
    ConvOp.FPROP: {
        0: "implicit GEMM",
        1: "implicit precomputed GEMM",
        2: "GEMM",
        3: "direct",
        4: "FFT",
        5: "FFT tiling",
        6: "Winograd",
        7: "Winograd non-fused",
    },
    ConvOp.DGRAD: {
        0: "algorithm 0",
        1: "algorithm 1",
        2: "FFT",
        3: "FFT tiling",
        4: "Winograd",
        5: "Winograd non-fused",
    },
    ConvOp.WGRAD: {
        0: "algorithm 0",
        1: "algorithm 1",
        2: "FFT",
        3: "algorithm 3",
        5: "Winograd non-fused",
        6: "FFT tiling",
    },
}
"""Numbers and names, per op; algorithm 4 of wgrad is not implemented."""

_QUERIES = {
    ConvOp.FPROP: ("cudnnGetConvolutionForwardWorkspaceSize", "xwcy"),
    ConvOp.DGRAD: ("cudnnGetConvolutionBackwardDataWorkspaceSize", "wycx"),
    ConvOp.WGRAD: ("cudnnGetConvolutionBackwardFilterWorkspaceSize", "xycw"),
}
"""By op, the function and the order of its descriptors."""


@dataclasses.dataclass(frozen=True)
class LegacyRow:
    """What each algorithm of the legacy API answers; status 0 is success.

    Attributes:
        layer: name of the layer.
        op: which of the three.
        setting: type and layout.
        batch: samples.
        algorithm: its name.
        status: cuDNN's.
        workspace_bytes: that it needs; None if refused.
    """

    layer: str
    op: str
    setting: str
    batch: int
    algorithm: str
    status: int
    workspace_bytes: int | None


@dataclasses.dataclass(frozen=True)
class BesideRow:
    """Workspaces of the plans and of the legacy algorithms for the same problem.

    Attributes:
        layer: name of the layer.
        op: which of the three.
        setting: type and layout.
        batch: samples.
        plans: how many are listed.
        first_bytes: of cuDNN's first plan.
        least_bytes: of all plans.
        most_bytes: of all plans.
        legacy: how many legacy algorithms compute it.
        least_legacy_bytes: of those.
        most_legacy_bytes: of those.
    """

    layer: str
    op: str
    setting: str
    batch: int
    plans: int
    first_bytes: int | None
    least_bytes: int | None
    most_bytes: int | None
    legacy: int
    least_legacy_bytes: int | None
    most_legacy_bytes: int | None


class LegacyError(Exception):
    """A descriptor of the legacy API could not be made."""


class LegacyLibrary:
    """The functions of the legacy API that tell workspaces, of a libcudnn that is loaded already."""

    def __init__(self, library: Library) -> None:
        self._opened = ctypes.CDLL(library.path)

    def workspace(self, handle: int | None, problem: ConvProblem, algorithm: int) -> tuple[int, int]:
        """Return cuDNN's status and the bytes, which mean nothing unless the status is 0."""
        name, order = _QUERIES[problem.op]
        n_bytes = ctypes.c_size_t()
        with self._descriptors(problem) as descriptors:
            status = self._function(name)(
                ctypes.c_void_p(handle),
                *(descriptors[letter] for letter in order),
                ctypes.c_int(algorithm),
                ctypes.byref(n_bytes),
            )
        return int(status), n_bytes.value

    @contextlib.contextmanager
    def _descriptors(self, problem: ConvProblem) -> Iterator[dict[str, ctypes.c_void_p]]:
        """The descriptors of x, w, y and the convolution, by letter."""
        dtype = int(_DATA_TYPES[problem.dtype])
        x, w, y = tensor_layouts(problem)
        with contextlib.ExitStack() as stack:
            made = {letter: self._made(stack, "Tensor") for letter in "xy"}
            made["w"], made["c"] = self._made(stack, "Filter"), self._made(stack, "Convolution")
            for letter, layout in (("x", x), ("y", y)):
                shape, strides = _ints(layout.shape), _ints(layout.strides)
                self._set("cudnnSetTensorNdDescriptor", made[letter], dtype, len(shape), shape, strides)
            layout_number = _FILTER_FORMATS[problem.filter_layout]
            shape = _ints(w.shape)
            self._set("cudnnSetFilterNdDescriptor", made["w"], dtype, layout_number, len(shape), shape)
            self._set_convolution(made["c"], problem)
            yield made

    def _set_convolution(self, descriptor: ctypes.c_void_p, problem: ConvProblem) -> None:
        numbers = [_ints(each) for each in (problem.padding, problem.stride, problem.dilation)]
        mode, rank = int(ConvolutionMode.CROSS_CORRELATION), len(problem.padding)
        self._set("cudnnSetConvolutionNdDescriptor", descriptor, rank, *numbers, mode, int(DataType.FLOAT))
        self._set("cudnnSetConvolutionGroupCount", descriptor, problem.groups)
        math_type = _TENSOR_OP_MATH if problem.itemsize == 2 else _DEFAULT_MATH
        self._set("cudnnSetConvolutionMathType", descriptor, math_type)

    def _made(self, stack: contextlib.ExitStack, kind: str) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        self._checked(f"cudnnCreate{kind}Descriptor", ctypes.byref(descriptor))
        stack.callback(self._function(f"cudnnDestroy{kind}Descriptor"), descriptor)
        return descriptor

    def _set(
        self, name: str, descriptor: ctypes.c_void_p, *values: "int | ctypes.Array[ctypes.c_int]"
    ) -> None:
        numbers = (ctypes.c_int(value) if isinstance(value, int) else value for value in values)
        self._checked(name, descriptor, *numbers)

    def _checked(self, name: str, *arguments: object) -> None:
        status = self._function(name)(*arguments)
        if status:
            raise LegacyError(f"{name} must succeed, but gave {status}.")

    def _function(self, name: str) -> Callable[..., int]:
        return cast("Callable[..., int]", getattr(self._opened, name))


def _ints(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int]":
    return (ctypes.c_int * len(values))(*values)


def rows(task: Task) -> Iterator[object]:
    """Yield every legacy algorithm of every problem, and both kinds of workspaces side by side."""
    ground = task.ground
    legacy = LegacyLibrary(ground.library)
    with ground.precision(allow_tf32=True):
        for case in all_cases(task.layers):
            if task.deadline.is_over:
                yield Cut(f"{case.layer}, {case.problem.op}, {case.setting} and what follows")
                return
            asked = [*_legacy_rows(legacy, ground.handle(), case)]
            yield from asked
            yield _beside(case, ground.enumerator().listed(case.problem), asked)


def _legacy_rows(legacy: LegacyLibrary, handle: int | None, case: Case) -> Iterator[LegacyRow]:
    problem = case.problem
    for number, name in ALGORITHMS[problem.op].items():
        status, n_bytes = legacy.workspace(handle, problem, number)
        yield LegacyRow(
            case.layer, problem.op, case.setting, problem.batch, name, status, None if status else n_bytes
        )


def _beside(case: Case, plans: Sequence[EngineConfiguration], asked: Sequence[LegacyRow]) -> BesideRow:
    declared = [each.workspace_bytes for each in plans]
    legacy = [row.workspace_bytes for row in asked if row.workspace_bytes is not None]
    return BesideRow(
        layer=case.layer,
        op=case.problem.op,
        setting=case.setting,
        batch=case.problem.batch,
        plans=len(plans),
        first_bytes=declared[0] if declared else None,
        least_bytes=min(declared, default=None),
        most_bytes=max(declared, default=None),
        legacy=len(legacy),
        least_legacy_bytes=min(legacy, default=None),
        most_legacy_bytes=max(legacy, default=None),
    )


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield how the legacy algorithms' workspaces lie beside the plans'."""
    compared = only(BesideRow, rows)
    answered = [row for row in compared if row.legacy]
    more = sum((row.most_legacy_bytes or 0) > (row.most_bytes or 0) for row in answered)
    less = sum((row.least_legacy_bytes or 0) < (row.least_bytes or 0) for row in answered)
    yield Answer(
        "Do legacy algorithms want other workspaces than the plans?",
        f"{len(answered)} of {len(compared)} problems have one; in {more} the largest wants more than every "
        f"plan, in {less} the least wants less",
    )
