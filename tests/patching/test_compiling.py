"""What is marked for Dynamo without loading it."""

import torch

from mucudnn.patching.compiling import constant


def _first() -> bool:
    return True


def _second() -> bool:
    return True


def test_a_constant_is_marked_as_pytorch_marks_it() -> None:
    assert constant(_first) is _first
    assert vars(_first) == vars(torch.compiler.assume_constant_result(_second)) != {}
