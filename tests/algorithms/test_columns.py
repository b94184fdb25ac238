"""Columns of some rows at a time: when they are tried, and what they need."""

import dataclasses

import pytest

from mucudnn.algorithms import named, offered
from mucudnn.algorithms.columns import ColumnAlgorithm
from mucudnn.problem import ConvOp, ConvProblem
from tests.operands import a_convolution

UPSAMPLING = a_convolution(
    batch=2, in_channels=128, out_channels=128, input_size=(32, 48, 48), kernel_size=(2, 2, 2),
    stride=(2, 2, 2), padding=(0, 0, 0), dilation=(1, 1, 1),
)  # fmt: skip
"""A transposed convolution of a 3-D U-Net."""

STRIDED = a_convolution(
    batch=8, in_channels=64, out_channels=128, input_size=(56, 56), stride=(2, 2), padding=(1, 1)
)
"""Of a ResNet: its columns take 2 MiB."""


def columns_of(problem: ConvProblem) -> list[str]:
    return [each.name for each in offered(problem, 1) if each.name.startswith("im2col")]


@pytest.mark.parametrize("op", ConvOp)
def test_rows_are_tried_where_the_columns_of_an_image_are_many(op: ConvOp) -> None:
    assert columns_of(UPSAMPLING.with_op(op)) == ["im2col", "im2col_rows2"]
    assert columns_of(STRIDED.with_op(op)) == ["im2col"]


@pytest.mark.parametrize("op", ConvOp)
def test_columns_of_rows_need_less_than_a_seventh_of_the_workspace(op: ConvOp) -> None:
    problem = UPSAMPLING.with_op(op)

    assert ColumnAlgorithm(2).workspace_bytes(problem) < ColumnAlgorithm().workspace_bytes(problem) / 7


def test_the_name_says_how_many_rows() -> None:
    assert named("im2col_rows28") == ColumnAlgorithm(28)
    assert named("im2col") == ColumnAlgorithm()
    assert named("im2col_rows0") is None


def test_rows_are_fewer_than_there_are() -> None:
    some, all_of_them = (ColumnAlgorithm(rows) for rows in (27, 28))

    assert some.refusal(STRIDED) is None
    assert all_of_them.refusal(STRIDED) == "there are no more rows than that"
    assert "nothing to compute" in str(some.refusal(dataclasses.replace(STRIDED, batch=0)))
