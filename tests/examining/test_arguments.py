"""What a sample stands for, and what is said of one that a model does not run on."""

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mucudnn.errors import SampleError
from mucudnn.examining.arguments import CallArguments, rejected
from mucudnn.examining.extraction import extract
from tests.models import a_batch


def test_a_mapping_of_any_kind_stands_for_keywords() -> None:
    found = CallArguments.of(UserDict(image=1, scale=2))

    assert (found.args, found.kwargs) == ((), {"image": 1, "scale": 2})


def test_who_gives_one_argument_where_two_are_wanted_is_not_told_of_several() -> None:
    class Pairs(nn.Conv2d):
        def forward(self, image: Tensor, other: Tensor) -> Tensor:
            return super().forward(image + other)

    with pytest.raises(SampleError, match=r"missing 1 required positional argument: 'other'\W*\.$"):
        extract(Pairs(3, 4, 3), a_batch())


def test_keywords_are_among_the_arguments_that_a_model_takes() -> None:
    class Scaled(nn.Module):
        def forward(self, image: Tensor, other: Tensor, *, scale: float) -> Any:
            return image + scale * other

    sample = CallArguments((a_batch(), a_batch()), {"scale": 2.0})

    assert "labels" not in str(rejected(Scaled(), sample, TypeError("no such type")))


def test_who_gives_a_dict_that_is_one_argument_is_told_how() -> None:
    class Labelled(nn.Conv2d):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["image"])

    sample = {"image": a_batch()}
    with pytest.raises(SampleError, match=r"give a dict that is one argument as \(\{\.\.\.\},\)"):
        extract(Labelled(3, 4, 3), sample)
    assert extract(Labelled(3, 4, 3), (sample,)).calls

    error = TypeError("of the model itself")
    assert "dict" not in str(rejected(nn.Conv2d(3, 4, 3), CallArguments.of({"input": a_batch()}), error))


def test_a_model_that_does_not_tell_what_it_takes_may_have_got_labels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model.forward = torch.conv2d  # type: ignore[method-assign, assignment]  # written in C++

    with pytest.raises(SampleError, match=r"with 2 arguments, .*: leave out labels"):
        extract(model, (a_batch(), 1))
