"""What of a card and of PyTorch's settings decides whether a plan may run: flags, asked of at every call."""

import types
import warnings

import pytest
import torch

from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.convolutions.notices import Notice
from mucudnn.errors import UntunedWarning
from mucudnn.patching.fitting import Memory
from mucudnn.patching.shapes import TunedShapes, Variant
from tests.cudnn.paper import PaperCard
from tests.cudnn.test_card import a_card
from tests.operands import a_convolution

PROBLEM = a_convolution()


def a_backend(kind: str) -> CudnnBackend:
    return CudnnBackend(PaperCard(kind=kind), None)


def shapes_tuned_on(backend: CudnnBackend) -> TunedShapes:
    memory = Memory(backend.environment(), backend.own, False, 0, 0, 0)  # noqa: FBT003  # not in sharing mode
    return TunedShapes("conv", (Variant(PROBLEM, {}),), memory, Notice(), backend.flags())


def test_a_model_that_is_moved_to_another_kind_of_card_runs_as_before_and_says_so() -> None:
    shapes = shapes_tuned_on(a_backend("NVIDIA H200"))

    with pytest.warns(
        UntunedWarning, match="another environment: device name was NVIDIA H200, is NVIDIA A100"
    ):
        assert shapes.convolution(a_backend("NVIDIA A100"), PROBLEM) is None


def test_a_model_that_is_moved_to_a_card_of_the_same_kind_runs_its_plan() -> None:
    shapes = shapes_tuned_on(a_backend("NVIDIA H200"))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        assert shapes.convolution(a_backend("NVIDIA H200"), PROBLEM) is not None


def test_a_card_is_asked_once_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(index: int) -> object:
        asked.append(index)
        return types.SimpleNamespace(name=f"card {index}", major=9, minor=0, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    cards = [a_card(index) for index in (0, 1)]

    flags = [[CudnnBackend(card, None).flags() for _ in range(2)] for card in cards]

    assert flags[0][0] == flags[0][1] != flags[1][0]
    assert asked == [0, 1]
