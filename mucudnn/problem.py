"""What is computed: one op of a convolution with all its shapes."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType

from mucudnn.errors import ProblemError
from mucudnn.locks import cached_property

_ITEMSIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


OPTIONAL: Mapping[str, bool] = MappingProxyType({"is_optional": True})
"""Marks a dataclass's field that stands in files only where it differs from its default.

Files without such a field, those of older versions among them, stay byte for byte what they are.
"""

_BUFFER_ALIGNMENT_BYTES = 512
"""What PyTorch's allocator for CUDA aligns every tensor to."""


class ConvOp(StrEnum):
    """The three convolutions of a training step."""

    FPROP = "fprop"
    """y from x and w."""
    DGRAD = "dgrad"
    """dx from dy and w."""
    WGRAD = "wgrad"
    """dw from x and dy, summed over the batch."""


class Layout(StrEnum):
    """The order in which a tensor lies in memory; PyTorch's memory formats."""

    CONTIGUOUS = "contiguous"
    """Channels before space: NCHW."""
    CHANNELS_LAST = "channels_last"
    """Channels innermost: NHWC."""


def cudnn_layout(layout: Layout, dtype: str) -> Layout:
    """Return the layout in which PyTorch has cuDNN compute; of float64 that is always the contiguous one.

    Source: PyTorch, aten/src/ATen/native/ConvUtils.h, cudnn_conv_use_channels_last.
    """
    return Layout.CONTIGUOUS if dtype == "float64" else layout


@dataclasses.dataclass(frozen=True)
class ConvProblem:
    """One op of a convolution with everything that decides what is computed and how fast.

    The letters are those of cuDNN: the image x is (n, c, *input_size), the filter w is
    (k, c / groups, *kernel_size), the output y is (n, k, *output_size); dx, dw and dy have the shapes
    of x, w and y. The convolution is a cross-correlation, as in PyTorch. One-, two- and
    three-dimensional problems differ in the length of the tuples only. A transposed convolution is the
    same three ops with the roles exchanged: its forward is `dgrad`.

    Attributes:
        op: which of the three convolutions.
        batch: n; a micro-batch has a problem of its own.
        in_channels: c.
        out_channels: k.
        input_size: spatial size of x.
        kernel_size: spatial size of w.
        stride: step of the filter in x.
        padding: zeros on each side of x.
        dilation: step between the taps of the filter.
        groups: number of groups; divides c and k.
        dtype: torch's name of the type of x, w and y.
        layout: layout of x and y.
        filter_layout: layout of w; contiguous where both are the same order in memory, whatever is given, so
            that filters which only their strides of length 1 tell apart have one problem.
        bias: whether fprop adds a bias to y.
        alignment_bytes: what every pointer passed is a multiple of.
        is_apart: whether it is of a transposed convolution that PyTorch computes otherwise than as the
            gradient of a plain one, as in float64 on processors: then PyTorch's own is another. Else
            problems of both kinds are equal.

    Raises:
        ProblemError: the shapes are no convolution.
    """

    op: ConvOp
    batch: int
    in_channels: int
    out_channels: int
    input_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    dtype: str = "float32"
    layout: Layout = Layout.CONTIGUOUS
    filter_layout: Layout = Layout.CONTIGUOUS
    bias: bool = False
    alignment_bytes: int = 16
    is_apart: bool = dataclasses.field(default=False, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_groups(self)
        if self.dtype not in _ITEMSIZE:
            raise ProblemError(f"dtype must be one of {', '.join(_ITEMSIZE)}, but got {self.dtype!r}.")
        if not isinstance(self.bias, bool):
            raise ProblemError(f"bias must be True or False, but got {self.bias!r}.")
        if not isinstance(self.is_apart, bool):
            raise ProblemError(f"is_apart must be True or False, but got {self.is_apart!r}.")
        if self.is_apart and self.bias:
            raise ProblemError("A transposed convolution adds its bias apart, but got bias=True.")
        if any(size < 1 for size in self.output_size):
            raise ProblemError(
                f"The filter must fit into the padded image, but got input size {self.input_size}, "
                f"padding {self.padding}, kernel {self.kernel_size}, dilation {self.dilation}."
            )
        if self.has_one_filter_order:
            object.__setattr__(self, "filter_layout", Layout.CONTIGUOUS)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Keep all but the hash: texts have another one in every process."""
        state = dict(self.__dict__)  # at once: another thread may come to know more of it meanwhile
        state.pop("_hash", None)
        return state

    @cached_property
    def _hash(self) -> int:
        """Of the fields: profiles are looked up by problems a hundred thousand times."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def has_one_filter_order(self) -> bool:
        """Whether w is in memory the same in both layouts: it has one tap, or each group one channel."""
        return math.prod(self.kernel_size) == 1 or self.in_channels == self.groups

    @cached_property
    def output_size(self) -> tuple[int, ...]:
        """Spatial size of y."""
        return tuple(way // step + 1 for way, step in self._ways())

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of x and dx: (n, c, *input_size)."""
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def filter_shape(self) -> tuple[int, ...]:
        """Shape of w and dw: (k, c / groups, *kernel_size)."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    @property
    def output_padding(self) -> tuple[int, ...]:
        """What a transposed convolution, of which this is the forward pass, adds to its shortest result.

        Several input sizes have one output size where the stride is more than 1; o < stride tells them apart:
        o = (size + 2 * padding - dilation * (taps - 1) - 1) mod stride.
        """
        return tuple(way % step for way, step in self._ways())

    def _ways(self) -> Iterator[tuple[int, int]]:
        """Yield how far the filter can move in the padded image, and its step, of each dimension."""
        for size, pad, dilation, taps, step in zip(
            self.input_size, self.padding, self.dilation, self.kernel_size, self.stride, strict=True
        ):
            yield size + 2 * pad - dilation * (taps - 1) - 1, step

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of y and dy: (n, k, *output_size)."""
        return (self.batch, self.out_channels, *self.output_size)

    @property
    def form(self) -> str:
        """Type and layouts in words, the filter's only where it is another: "float32 channels_last"."""
        if self.filter_layout is not self.layout and not self.has_one_filter_order:
            return f"{self.dtype} {self.layout}, filter {self.filter_layout}"
        return f"{self.dtype} {self.layout}"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self.dtype]

    @property
    def input_bytes(self) -> int:
        """Bytes of x."""
        return math.prod(self.input_shape) * self.itemsize

    @property
    def filter_bytes(self) -> int:
        """Bytes of w."""
        return math.prod(self.filter_shape) * self.itemsize

    @property
    def output_bytes(self) -> int:
        """Bytes of y."""
        return math.prod(self.output_shape) * self.itemsize

    @property
    def flops(self) -> int:
        """Operations of the direct algorithm, two per multiply-add, padding counted.

        2·n·k·p·q·(c/groups)·r·s for each of the three ops: the nominal count, whatever algorithm runs,
        so a rate made from it is an effective rate and may exceed the device's peak.
        """
        return 2 * math.prod(self.output_shape) * math.prod(self.filter_shape[1:])

    @property
    def terms(self) -> int:
        """Number of products that add up to one value of the result, padding counted."""
        if self.op is ConvOp.WGRAD:
            return self.batch * math.prod(self.output_size)
        channels = self.in_channels if self.op is ConvOp.FPROP else self.out_channels
        return channels // self.groups * math.prod(self.kernel_size)

    @property
    def sum_dtype(self) -> str:
        """Type in which the weight gradients of parts add up: float32 for 16-bit ones, else their own."""
        return "float32" if self.itemsize == 2 else self.dtype

    @property
    def running_sum_bytes(self) -> int:
        """Bytes of the float32 sum in which the parts of a 16-bit weight gradient add up; else 0.

        It lies at the start of a workspace, so it counts in whole multiples of the alignment of device
        memory: what lies behind starts as well aligned as the buffer itself.
        """
        if self.op is not ConvOp.WGRAD or self.sum_dtype == self.dtype:
            return 0
        return -(-2 * self.filter_bytes // _BUFFER_ALIGNMENT_BYTES) * _BUFFER_ALIGNMENT_BYTES

    def with_batch(self, batch: int) -> "ConvProblem":
        """Return the same problem for `batch` samples."""
        return _changed(self, batch=batch)

    def part(self, size: int) -> "ConvProblem":
        """Return the problem of a micro-batch of `size` samples of this mini-batch.

        Its alignment is what the start of a part has that comes after parts of sizes with the same alignment
        or a larger one: multiples of 8 samples in 16 bits and of 4 in 32 keep 16 bytes whatever the shape.
        The whole mini-batch is this problem itself.
        """
        if size == self.batch:
            return self
        alignment = self.alignment_bytes
        for shape in (self.input_shape, self.output_shape):
            alignment = math.gcd(alignment, size * math.prod(shape[1:]) * self.itemsize)
        return _changed(self, batch=size, alignment_bytes=alignment)

    def with_op(self, op: ConvOp) -> "ConvProblem":
        """Return another of the three ops of the same convolution."""
        return _changed(self, op=op)

    @cached_property
    def key(self) -> str:
        """A text that is equal for equal problems only, and the same in every process.

        Stores of versions in which it was another one have theirs changed when they are opened.
        """
        return json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON values, an optional one only where it is not its default."""
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {
            field.name: value
            for field, value in values
            if not ("is_optional" in field.metadata and value == field.default)
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> "ConvProblem":
        """Return the problem of which `to_json` gave `fields`.

        Raises:
            ProblemError: a field is missing, unknown or no convolution's.
        """
        try:
            values = {
                name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
            }
            values["op"] = ConvOp(str(values["op"]))
            values["layout"] = Layout(str(values["layout"]))
            values["filter_layout"] = Layout(str(values["filter_layout"]))
            return cls(**values)  # type: ignore[arg-type]  # checked by __post_init__
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProblemError(
                f"A problem's fields must be those of a convolution, but got {fields}."
            ) from error

    def __str__(self) -> str:
        text = (
            f"{self.op} {self.batch}x{self.in_channels}x{_by(self.input_size)} -> {self.out_channels}, "
            f"kernel {_by(self.kernel_size)}, stride {_by(self.stride)}, padding {_by(self.padding)}"
        )
        if any(step != 1 for step in self.dilation):
            text += f", dilation {_by(self.dilation)}"
        if self.groups != 1:
            text += f", groups {self.groups}"
        return f"{text}, {self.form}" + ", transposed" * self.is_apart


@functools.lru_cache(4096, typed=True)  # a plan asks for the same few thousand again and again
def _changed(problem: ConvProblem, **fields: object) -> ConvProblem:
    return dataclasses.replace(problem, **fields)  # type: ignore[arg-type]  # checked by __post_init__


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in sizes)


def _check_numbers(problem: ConvProblem) -> None:
    spatial = {name: getattr(problem, name) for name in ("kernel_size", "stride", "dilation", "padding")}
    rank = len(problem.input_size)
    if rank not in (1, 2, 3):
        raise ProblemError(f"A problem must have 1 to 3 spatial dimensions, but got {problem.input_size}.")
    for name, sizes in {"input_size": problem.input_size, **spatial}.items():
        least = 0 if name in ("padding", "input_size") else 1
        if len(sizes) != rank or any(not isinstance(size, int) or size < least for size in sizes):
            raise ProblemError(f"{name} must be {rank} numbers of at least {least}, but got {sizes}.")
    for name in ("batch", "in_channels", "out_channels", "groups", "alignment_bytes"):
        least = 0 if name == "batch" else 1
        number = getattr(problem, name)
        if not isinstance(number, int) or number < least:
            raise ProblemError(f"{name} must be a number of at least {least}, but got {number!r}.")
    if problem.alignment_bytes & (problem.alignment_bytes - 1):
        raise ProblemError(f"alignment_bytes must be a power of two, but got {problem.alignment_bytes}.")


def _check_groups(problem: ConvProblem) -> None:
    c, k, groups = problem.in_channels, problem.out_channels, problem.groups
    if c % groups or k % groups:
        raise ProblemError(f"groups must divide both c and k, but got groups={groups}, c={c}, k={k}.")


def problems_of(problem: ConvProblem) -> dict[ConvOp, ConvProblem]:
    """Return the three problems of a training step, from that of the forward pass; gradients have no bias."""
    without = _changed(problem, bias=False)
    return {op: problem if op is problem.op else without.with_op(op) for op in ConvOp}


_EXCHANGED = {ConvOp.FPROP: ConvOp.DGRAD, ConvOp.DGRAD: ConvOp.FPROP, ConvOp.WGRAD: ConvOp.WGRAD}


def op_of(role: ConvOp, *, is_transposed: bool) -> ConvOp:
    """Return the op of a layer's forward pass (fprop), input gradient (dgrad) or weight gradient (wgrad).

    They are those of the same name, but in a transposed convolution, where input and output change places.
    """
    return _EXCHANGED[role] if is_transposed else role
