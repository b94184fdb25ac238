"""What is said of the names of algorithms."""

import re

import pytest

from mucudnn.problem import ConvOp
from mucudnn.report import render_plan
from mucudnn.report.algorithm_words import meanings
from tests.examples import a_plan
from tests.report.plans import FASTER, KEPT, OWN, WINOGRAD, assigned, note

MORE = r"\. The table of all: mucudnn/algorithms/README\.md\."


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "cc_winograd4_rows7_mt2",
            "cc_: code in C; _mt2: [^;]* block each; _rows7 and the like: [^;]* at a time",
        ),
        ("cc_depthwise", "cc_: code in C"),
        ("bf16x3_images8", "bf16x3: products of bfloat16 [^;]*; _images8 and the like: [^;]* at a time"),
        ("fft24", "fft24: tiles by [^;]*"),
        ("onednn_nhwc", "onednn_nhwc: PyTorch's own [^;]*"),
        ("eng65_k2=5_k13=1", "eng65: an engine of cuDNN, [^;]*"),
    ],
)
def test_each_part_of_a_name_is_explained(name: str, told: str) -> None:
    assert re.fullmatch(told + MORE, meanings([name]) or "")


def test_parts_of_several_names_are_explained_once_and_plain_names_not_at_all() -> None:
    told = meanings(["cc_winograd4_k64", "im2col", "cc_winograd2_k32"])

    assert told == meanings(["cc_winograd2_k32"])
    assert meanings(["im2col", "gemm", "aten"]) is None


def test_a_plan_explains_the_names_that_it_has() -> None:
    rows = assigned("conv", ConvOp.FPROP, WINOGRAD, FASTER), assigned("conv", ConvOp.DGRAD, OWN, KEPT)

    assert note(render_plan(a_plan(assignments=rows)), "names").startswith("winograd4: tiles by torch's")
    assert "\nnames " not in render_plan(a_plan(assignments=rows[1:]))
