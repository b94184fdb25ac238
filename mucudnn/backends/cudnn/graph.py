"""From a problem to cuDNN's operation graph: three tensors and the one convolution between them."""

import dataclasses
import math

from mucudnn.backends.cudnn.constants import Attribute, AttributeType, ConvolutionMode, DataType, Kind
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.library import Library
from mucudnn.errors import BackendError
from mucudnn.problem import ConvOp, ConvProblem, Layout

UID_X = 1
"""Id of the image, x or dx, in every graph and variant pack."""
UID_W = 2
"""Id of the filter, w or dw."""
UID_Y = 3
"""Id of the layer's output, y or dy."""

_DATA_TYPES = {
    "float16": DataType.HALF,
    "bfloat16": DataType.BFLOAT16,
    "float32": DataType.FLOAT,
    "float64": DataType.DOUBLE,
}


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """A packed tensor as cuDNN sees it; strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Operation:
    """The kind of one of the three operations, and the attributes of what it refers to."""

    kind: Kind
    alpha: Attribute
    beta: Attribute
    convolution: Attribute
    x: Attribute
    w: Attribute
    y: Attribute


_OPERATIONS = {
    ConvOp.FPROP: _Operation(
        Kind.FORWARD,
        Attribute.FORWARD_ALPHA,
        Attribute.FORWARD_BETA,
        Attribute.FORWARD_CONVOLUTION,
        Attribute.FORWARD_X,
        Attribute.FORWARD_W,
        Attribute.FORWARD_Y,
    ),
    ConvOp.DGRAD: _Operation(
        Kind.BACKWARD_DATA,
        Attribute.BACKWARD_DATA_ALPHA,
        Attribute.BACKWARD_DATA_BETA,
        Attribute.BACKWARD_DATA_CONVOLUTION,
        Attribute.BACKWARD_DATA_DX,
        Attribute.BACKWARD_DATA_W,
        Attribute.BACKWARD_DATA_DY,
    ),
    ConvOp.WGRAD: _Operation(
        Kind.BACKWARD_FILTER,
        Attribute.BACKWARD_FILTER_ALPHA,
        Attribute.BACKWARD_FILTER_BETA,
        Attribute.BACKWARD_FILTER_CONVOLUTION,
        Attribute.BACKWARD_FILTER_X,
        Attribute.BACKWARD_FILTER_DW,
        Attribute.BACKWARD_FILTER_DY,
    ),
}


def unsupported(problem: ConvProblem) -> str | None:
    """Return why cuDNN is not asked about `problem`, as a sentence; None if it is."""
    if problem.dtype not in _DATA_TYPES:
        return f"dtype must be one of {', '.join(_DATA_TYPES)}, but got {problem.dtype}."
    if problem.batch == 0:
        return "The batch must hold a sample at least, but got 0."
    if 0 in problem.input_shape:
        return f"The image must have elements, but got the shape {problem.input_shape}."
    if problem.alignment_bytes % problem.itemsize:
        return (
            f"alignment_bytes must be a multiple of the itemsize {problem.itemsize}, "
            f"but got {problem.alignment_bytes}."
        )
    return None


def strides_of(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Return the strides in elements of a packed tensor; those of size-1 dimensions follow the layout too.

    Args:
        shape: (n, c, *spatial).
        layout: the order in which the dimensions lie in memory.
    """
    space = range(2, len(shape))
    order = (0, 1, *space) if layout is Layout.CONTIGUOUS else (0, *space, 1)
    return tuple(
        math.prod(shape[inner] for inner in order[order.index(dimension) + 1 :])
        for dimension in range(len(shape))
    )


def tensor_layouts(problem: ConvProblem) -> tuple[TensorLayout, TensorLayout, TensorLayout]:
    """Return x, w and y of `problem`, or their gradients, which have the same shapes."""
    # cuDNN reads the strides of size-1 dimensions as the filter's layout: given the other one, some plans ask
    # for the workspace of a conversion that changes nothing.
    of_image = problem.layout
    of_filter = of_image if problem.has_one_filter_order else problem.filter_layout
    return (
        TensorLayout(problem.input_shape, strides_of(problem.input_shape, of_image)),
        TensorLayout(problem.filter_shape, strides_of(problem.filter_shape, of_filter)),
        TensorLayout(problem.output_shape, strides_of(problem.output_shape, of_image)),
    )


def operation_graph(
    library: Library, problem: ConvProblem, accumulate: bool, handle: int | None = None
) -> Descriptor:
    """Return the finalised graph of the one operation: result = op + beta · result.

    The bias is no part of it. Every pointer that is ever passed must be a multiple of
    `problem.alignment_bytes`.

    Args:
        library: cuDNN.
        problem: one that is not `unsupported`.
        accumulate: whether beta is 1 and not 0.
        handle: of the device for which it is; None if that is told by a description.

    Raises:
        BackendError: the problem is unsupported.
        CudnnError: cuDNN refuses the shapes.
    """
    reason = unsupported(problem)
    if reason is not None:
        raise BackendError(reason)
    x, w, y = (
        _tensor(library, problem, uid, layout)
        for uid, layout in zip((UID_X, UID_W, UID_Y), tensor_layouts(problem), strict=True)
    )
    names = _OPERATIONS[problem.op]
    operation = (
        Descriptor(library, names.kind)
        .set_descriptors(names.convolution, _convolution(library, problem))
        .set_descriptors(names.x, x)
        .set_descriptors(names.w, w)
        .set_descriptors(names.y, y)
    )
    _set_scalar(operation, problem, names.alpha, 1.0)
    _set_scalar(operation, problem, names.beta, 1.0 if accumulate else 0.0)
    graph = Descriptor(library, Kind.OPERATION_GRAPH)
    if handle is not None:
        graph.set_handle(Attribute.GRAPH_HANDLE, handle)
    return graph.set_descriptors(Attribute.GRAPH_OPERATIONS, operation.finalized()).finalized()


def _tensor(library: Library, problem: ConvProblem, uid: int, layout: TensorLayout) -> Descriptor:
    return (
        Descriptor(library, Kind.TENSOR)
        .set_ints(Attribute.TENSOR_ID, uid)
        .set_enum(Attribute.TENSOR_DATA_TYPE, AttributeType.DATA_TYPE, _DATA_TYPES[problem.dtype])
        .set_ints(Attribute.TENSOR_DIMENSIONS, *layout.shape)
        .set_ints(Attribute.TENSOR_STRIDES, *layout.strides)
        .set_ints(Attribute.TENSOR_ALIGNMENT, problem.alignment_bytes)
        .finalized()
    )


def _convolution(library: Library, problem: ConvProblem) -> Descriptor:
    compute_type = DataType.DOUBLE if problem.dtype == "float64" else DataType.FLOAT
    mode = ConvolutionMode.CROSS_CORRELATION
    return (
        Descriptor(library, Kind.CONVOLUTION)
        .set_enum(Attribute.CONVOLUTION_COMPUTE_TYPE, AttributeType.DATA_TYPE, compute_type)
        .set_enum(Attribute.CONVOLUTION_MODE, AttributeType.CONVOLUTION_MODE, mode)
        .set_ints(Attribute.CONVOLUTION_SPATIAL_DIMENSIONS, len(problem.kernel_size))
        .set_ints(Attribute.CONVOLUTION_DILATION, *problem.dilation)
        .set_ints(Attribute.CONVOLUTION_STRIDE, *problem.stride)
        .set_ints(Attribute.CONVOLUTION_PADDING_BEFORE, *problem.padding)
        .set_ints(Attribute.CONVOLUTION_PADDING_AFTER, *problem.padding)
        .finalized()
    )


def _set_scalar(operation: Descriptor, problem: ConvProblem, attribute: Attribute, value: float) -> None:
    """Set alpha or beta, which have the type in which sums are held."""
    if problem.dtype == "float64":
        operation.set_double(attribute, value)
    else:
        operation.set_float(attribute, value)
