"""What a problem computes and counts, and what is no problem."""

import dataclasses
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.errors import ProblemError
from mucudnn.problem import ConvOp, ConvProblem, Layout, problems_of
from tests.examples import OTHER_VALUES, a_problem


def test_a_part_of_a_multiple_of_eight_samples_in_16_bits_stays_aligned() -> None:
    problem = a_problem(batch=256, in_channels=3, input_size=(225, 225), dtype="bfloat16")

    assert problem.part(8).alignment_bytes == 16
    assert problem.part(24).alignment_bytes == 16


def test_a_part_of_one_odd_sample_is_aligned_to_what_its_size_divides() -> None:
    problem = a_problem(batch=256, in_channels=3, input_size=(225, 225), dtype="bfloat16")
    assert problem.part(1).input_bytes == 303_750

    assert problem.part(1).alignment_bytes == 2
    assert problem.part(2).alignment_bytes == 4


def test_the_whole_as_a_part_is_the_problem_itself() -> None:
    problem = a_problem(batch=3, in_channels=3, input_size=(225, 225), dtype="bfloat16")

    assert problem.part(3) is problem


@pytest.mark.parametrize(
    ("op", "dtype", "n_bytes"),
    [(ConvOp.WGRAD, "bfloat16", 4), (ConvOp.WGRAD, "float32", 0), (ConvOp.FPROP, "float16", 0)],
)
def test_16_bit_weight_gradients_add_up_in_32_bits(op: ConvOp, dtype: str, n_bytes: int) -> None:
    problem = a_problem(op=op, dtype=dtype)

    assert problem.running_sum_bytes == n_bytes * math.prod(problem.filter_shape)


def test_shapes_follow_the_letters_of_the_op() -> None:
    problem = a_problem(groups=8)

    assert problem.input_shape == (32, 16, 14, 12)
    assert problem.filter_shape == (24, 2, 3, 5)
    assert problem.output_shape == (32, 24, 7, 12)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation", "output"),
    [(7, 3, 1, 0, 1, 5), (7, 3, 2, 0, 1, 3), (8, 3, 2, 0, 1, 3), (7, 3, 1, 1, 1, 7), (7, 3, 1, 0, 3, 1)],
)
def test_output_size_counts_where_the_dilated_filter_fits(
    size: int, kernel: int, stride: int, padding: int, dilation: int, output: int
) -> None:
    problem = a_problem(
        input_size=(size,), kernel_size=(kernel,), stride=(stride,), padding=(padding,), dilation=(dilation,)
    )

    assert problem.output_size == (output,)


def test_flops_are_two_per_multiply_add_of_each_group() -> None:
    assert a_problem(groups=8).flops == 2 * 32 * 24 * 7 * 12 * 2 * 3 * 5


def test_flops_are_the_same_for_all_three_ops() -> None:
    assert len({a_problem(op=op).flops for op in ConvOp}) == 1


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4), ("complex128", 16)])
def test_bytes_are_elements_times_their_size(dtype: str, itemsize: int) -> None:
    problem = a_problem(dtype=dtype)

    assert problem.input_bytes == 32 * 16 * 14 * 12 * itemsize
    assert problem.filter_bytes == 24 * 16 * 3 * 5 * itemsize
    assert problem.output_bytes == 32 * 24 * 7 * 12 * itemsize


def test_a_batch_of_none_is_a_problem_without_work() -> None:
    assert a_problem(batch=0).flops == 0


def test_another_batch_and_another_op_change_nothing_else() -> None:
    assert a_problem().with_batch(5).with_op(ConvOp.DGRAD) == a_problem(batch=5, op=ConvOp.DGRAD)


def test_what_is_asked_for_again_is_made_once() -> None:
    one, other = a_problem(), a_problem()

    assert one.with_batch(5) is other.with_batch(5)
    assert one.part(1) is other.part(1)
    assert problems_of(one)[ConvOp.DGRAD] is problems_of(other)[ConvOp.DGRAD]


@pytest.mark.parametrize("batch", [8.0, "8"])
def test_a_batch_that_is_no_whole_number_is_refused_even_if_an_equal_one_was_made(batch: Any) -> None:
    a_problem().with_batch(8)

    with pytest.raises(ProblemError, match="batch must be a number of at least 0"):
        a_problem().with_batch(batch)


def test_the_key_is_the_same_in_every_version() -> None:
    assert a_problem(input_size=(14,), kernel_size=(3,), stride=(2,), padding=(1,), dilation=(1,)).key == (
        '{"alignment_bytes":16,"batch":32,"bias":false,"dilation":[1],"dtype":"float32",'
        '"filter_layout":"contiguous","groups":1,"in_channels":16,"input_size":[14],"kernel_size":[3],'
        '"layout":"contiguous","op":"fprop","out_channels":24,"padding":[1],"stride":[2]}'
    )


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ConvProblem)])
def test_each_field_alone_changes_the_key(name: str) -> None:
    assert a_problem(**{name: OTHER_VALUES[name]}).key != a_problem().key


def test_only_what_pytorch_computes_otherwise_tells_that_it_is_transposed() -> None:
    turned = a_problem(op=ConvOp.DGRAD, is_apart=True)

    assert "is_apart" not in a_problem().to_json()
    assert ConvProblem.from_json(json.loads(turned.key)) == turned
    assert {each.is_apart for each in problems_of(turned).values()} == {True}
    assert str(turned).endswith(", transposed")
    with pytest.raises(ProblemError, match="is_apart must be True or False, but got 1"):
        a_problem(is_apart=1)
    with pytest.raises(ProblemError, match="transposed convolution adds its bias apart"):
        a_problem(is_apart=True, bias=True)


@given(
    batch=st.integers(0, 2**31),
    groups=st.integers(1, 8),
    size=st.lists(st.integers(3, 2**20), min_size=1, max_size=3),
    op=st.sampled_from(ConvOp),
    layout=st.sampled_from(Layout),
)
def test_a_problem_survives_json(
    batch: int, groups: int, size: list[int], op: ConvOp, layout: Layout
) -> None:
    ones = (1,) * len(size)
    problem = ConvProblem(
        op, batch, groups, 2 * groups, tuple(size), ones, ones, ones, ones, groups, layout=layout
    )

    assert ConvProblem.from_json(json.loads(problem.key)) == problem


@given(
    size=st.integers(1, 40),
    kernel=st.integers(1, 9),
    stride=st.integers(1, 4),
    padding=st.integers(0, 4),
    dilation=st.integers(1, 4),
)
def test_output_size_equals_counting_the_positions(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    last_start = size + 2 * padding - (dilation * (kernel - 1) + 1)
    numbers = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    fields = {name: (number,) for name, number in numbers.items()}
    if last_start < 0:
        with pytest.raises(ProblemError, match="must fit into the padded image"):
            a_problem(input_size=(size,), **fields)
    else:
        starts = range(0, last_start + 1, stride)
        assert a_problem(input_size=(size,), **fields).output_size == (len(starts),)


def test_a_filter_larger_than_the_padded_image_is_refused_whatever_the_stride() -> None:
    with pytest.raises(ProblemError, match=r"must fit into the padded image, but got input size \(1, 12\)"):
        a_problem(input_size=(1, 12), padding=(0, 2), stride=(5, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 3}, "groups must divide both c and k, but got groups=3, c=16, k=24."),
        ({"groups": 12}, "groups must divide both c and k, but got groups=12, c=16, k=24."),
        ({"groups": 16}, "groups must divide both c and k, but got groups=16, c=16, k=24."),
        ({"dtype": "int8"}, "dtype must be one of float16, .*, but got 'int8'"),
        ({"bias": ()}, r"bias must be True or False, but got \(\)"),
        ({"bias": 1}, "bias must be True or False, but got 1"),
        ({"batch": -1}, "batch must be a number of at least 0, but got -1"),
        ({"in_channels": 0}, "in_channels must be a number of at least 1, but got 0"),
        ({"groups": 0}, "groups must be a number of at least 1, but got 0"),
        ({"alignment_bytes": 0}, "alignment_bytes must be a number of at least 1"),
        ({"alignment_bytes": 12}, "alignment_bytes must be a power of two, but got 12"),
        ({"batch": 2.0}, "batch must be a number of at least 0, but got 2.0"),
        ({"stride": (0, 1)}, r"stride must be 2 numbers of at least 1, but got \(0, 1\)"),
        ({"stride": (1,)}, "stride must be 2 numbers"),
        ({"padding": (-1, 0)}, "padding must be 2 numbers of at least 0"),
        ({"kernel_size": (3, 1.5)}, "kernel_size must be 2 numbers"),
        ({"input_size": (4, 4, 4, 4)}, "must have 1 to 3 spatial dimensions"),
    ],
)
def test_what_is_no_convolution_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        a_problem(**changes)


@pytest.mark.parametrize(
    "change", [{"op": "conv"}, {"layout": "NHWC"}, {"batch": "32"}, {"colour": "red"}, {"stride": 1}]
)
def test_fields_of_no_problem_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProblemError, match="fields must be those of a convolution"):
        ConvProblem.from_json({**a_problem().to_json(), **change})


def test_a_missing_field_is_refused() -> None:
    with pytest.raises(ProblemError, match="fields must be those of a convolution"):
        ConvProblem.from_json({"op": "fprop", "batch": 32})


def test_a_problem_reads_as_a_sentence() -> None:
    problem = a_problem(dilation=(2, 1), groups=4, input_size=(14, 12))

    assert str(problem) == (
        "fprop 32x16x14x12 -> 24, kernel 3x5, stride 2x1, padding 1x2, dilation 2x1, groups 4, "
        "float32 contiguous"
    )


@pytest.mark.parametrize("layout", Layout)
def test_a_filter_is_told_of_where_it_lies_otherwise_than_the_images(layout: Layout) -> None:
    problem = a_problem(layout=layout, filter_layout=Layout.CHANNELS_LAST)

    assert str(problem).endswith(", filter channels_last") == (layout is Layout.CONTIGUOUS)


@pytest.mark.parametrize(
    "changes", [{"kernel_size": (1, 1), "padding": (0, 0)}, {"groups": 16, "out_channels": 32}]
)
def test_filters_that_lie_alike_in_both_layouts_have_one_problem(changes: dict[str, Any]) -> None:
    one, other = (
        a_problem(layout=Layout.CHANNELS_LAST, filter_layout=layout, **changes) for layout in Layout
    )

    assert one == other
    assert one.key == other.key
    assert "filter" not in str(one)


def test_bytes_of_a_huge_problem_are_exact() -> None:
    problem = a_problem(batch=2**31, input_size=(2**20, 2**20))

    assert problem.input_bytes == math.prod((2**31, 16, 2**20, 2**20, 4))


def test_gradients_have_no_bias() -> None:
    problem = a_problem(op=ConvOp.FPROP, bias=True)

    assert {op: each.bias for op, each in problems_of(problem).items()} == {
        ConvOp.FPROP: True,
        ConvOp.DGRAD: False,
        ConvOp.WGRAD: False,
    }


@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_the_output_padding_is_what_a_transposed_result_has_beyond_its_shortest(
    more: int, padding: int
) -> None:
    stride, taps, dilation, size = 3, 2, 2, 5
    result = (size - 1) * stride - 2 * padding + dilation * (taps - 1) + 1 + more
    problem = a_problem(
        op=ConvOp.DGRAD,
        input_size=(result,),
        kernel_size=(taps,),
        stride=(stride,),
        padding=(padding,),
        dilation=(dilation,),
    )

    assert problem.output_size == (size,)
    assert problem.output_padding == (more,)


@pytest.mark.parametrize(
    ("op", "terms"), [(ConvOp.FPROP, 4 * 6), (ConvOp.DGRAD, 2 * 6), (ConvOp.WGRAD, 7 * 16)]
)
def test_the_terms_of_a_value_are_products_over_what_its_op_sums(op: ConvOp, terms: int) -> None:
    problem = a_problem(
        op=op, batch=7, in_channels=8, out_channels=4, groups=2, input_size=(4, 5), kernel_size=(3, 2),
        stride=(1, 1), padding=(1, 0), dilation=(1, 1),
    )  # fmt: skip
    assert problem.output_size == (4, 4)

    assert problem.terms == terms


def test_a_problem_does_not_take_its_hash_to_another_process() -> None:
    hashed, other = a_problem(), dataclasses.replace(a_problem())
    assert hash(hashed) == hash(other)

    read = pickle.loads(pickle.dumps(hashed))

    assert vars(read).keys() == vars(dataclasses.replace(other)).keys()
    assert {read: 1}[other] == 1
