"""Strides, what is not asked of cuDNN, and the graphs that it accepts."""

import dataclasses

import pytest

from mucudnn.backends.cudnn.constants import Attribute
from mucudnn.backends.cudnn.graph import operation_graph, strides_of, tensor_layouts, unsupported
from mucudnn.backends.cudnn.library import CudnnError, Library
from mucudnn.errors import BackendError
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.cudnn.doubles import library_double
from tests.cudnn.problems import conv, conv_in

CONTIGUOUS, CHANNELS_LAST = Layout.CONTIGUOUS, Layout.CHANNELS_LAST


@pytest.mark.parametrize(
    ("shape", "contiguous", "channels_last"),
    [
        ((2, 3, 5), (15, 5, 1), (15, 1, 3)),
        ((2, 3, 5, 7), (105, 35, 7, 1), (105, 1, 21, 3)),
        ((2, 3, 5, 7, 11), (1155, 385, 77, 11, 1), (1155, 1, 231, 33, 3)),
        ((2, 3, 1, 1), (3, 1, 1, 1), (3, 1, 3, 3)),
        ((2, 1, 5, 7), (35, 35, 7, 1), (35, 1, 7, 1)),
    ],
)
def test_strides_follow_the_layout_in_size_1_dimensions_too(
    shape: tuple[int, ...], contiguous: tuple[int, ...], channels_last: tuple[int, ...]
) -> None:
    assert strides_of(shape, CONTIGUOUS) == contiguous
    assert strides_of(shape, CHANNELS_LAST) == channels_last


def test_tensors_have_the_problems_shapes_and_each_its_own_layout() -> None:
    x, w, y = tensor_layouts(conv(stride=(2, 2), groups=4, filter_layout=CONTIGUOUS))

    assert (x.shape, x.strides) == ((16, 64, 56, 56), (200704, 1, 3584, 64))
    assert (w.shape, w.strides) == ((64, 16, 3, 3), (144, 9, 3, 1))
    assert (y.shape, y.strides) == ((16, 64, 28, 28), (50176, 1, 1792, 64))


@pytest.mark.parametrize(
    "changes", [{"kernel_size": (1, 1), "padding": (0, 0)}, {"groups": 64}, {"in_channels": 1}]
)
@pytest.mark.parametrize("layout", Layout)
def test_a_filter_that_lies_the_same_way_in_both_layouts_takes_that_of_the_image(
    changes: dict[str, object], layout: Layout
) -> None:
    both = [tensor_layouts(conv(layout=layout, filter_layout=other, **changes)) for other in Layout]

    assert both[0] == both[1]
    assert both[0][1].strides == strides_of(both[0][1].shape, layout)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"dtype": "complex64"},
            "dtype must be one of float16, bfloat16, float32, float64, but got complex64.",
        ),
        ({"batch": 0}, "The batch must hold a sample at least, but got 0."),
        ({"input_size": (0, 56)}, "The image must have elements, but got the shape (16, 64, 0, 56)."),
        ({"alignment_bytes": 1}, "alignment_bytes must be a multiple of the itemsize 2, but got 1."),
        (
            {"dtype": "float64", "alignment_bytes": 4},
            "alignment_bytes must be a multiple of the itemsize 8, but got 4.",
        ),
    ],
)
def test_what_cudnn_is_not_asked_has_its_reason(changes: dict[str, object], reason: str) -> None:
    assert unsupported(conv(padding=(2, 2), **changes)) == reason


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_four_types_are_supported(dtype: str) -> None:
    assert unsupported(conv(dtype=dtype)) is None


def test_no_graph_is_made_of_an_unsupported_problem() -> None:
    with pytest.raises(BackendError, match=r"^The batch must hold a sample at least, but got 0\.$"):
        operation_graph(library_double(), conv(batch=0), accumulate=False)


@pytest.mark.deviceless
@pytest.mark.parametrize(("op", "engines"), [(ConvOp.FPROP, 81), (ConvOp.DGRAD, 85), (ConvOp.WGRAD, 75)])
def test_cudnn_9_19_knows_this_many_engines(library: Library, op: ConvOp, engines: int) -> None:
    graph = operation_graph(library, conv(op), accumulate=False)

    assert graph.int_value(Attribute.GRAPH_ENGINES) == engines


@pytest.mark.deviceless
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "problem",
    [conv_in(1), conv_in(2), conv_in(3, batch=1), conv(groups=8), conv(stride=(3, 2), dilation=(2, 3))],
    ids=["1-D", "2-D", "3-D", "grouped", "strided and dilated"],
)
def test_cudnn_accepts_every_kind_of_problem(
    library: Library, problem: ConvProblem, op: ConvOp, dtype: str, accumulate: bool
) -> None:
    changed = conv_in(
        len(problem.input_size),
        op,
        batch=problem.batch,
        dtype=dtype,
        groups=problem.groups,
        stride=problem.stride,
        dilation=problem.dilation,
        padding=problem.padding,
    )

    assert operation_graph(library, changed, accumulate).pointer


@pytest.mark.deviceless
def test_a_graph_that_cudnn_refuses_is_an_error(library: Library) -> None:
    deaf = dataclasses.replace(library, set_attribute=lambda *_: 0)

    with pytest.raises(CudnnError, match=r"CUDNN_STATUS_BAD_PARAM"):
        operation_graph(deaf, conv(), accumulate=False)
