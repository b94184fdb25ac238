"""Random networks, each divided by hand and trained beside its unpatched twin."""

import copy
import dataclasses
import warnings
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from mucudnn.errors import UntunedWarning
from mucudnn.patching.applying import apply
from tests.architectures import Drawn, architectures
from tests.breadth import examples
from tests.plans import a_plan_for

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

STEPS = 3

BOUND = 1e-8
"""Of a difference in float64."""

FACTOR = 10
"""By which float32 may lose more than PyTorch's own does: rounding of other algorithms, in another order."""

EPSILON = torch.finfo(torch.float32).eps


def divided(drawn: Drawn) -> nn.Module:
    """Return a copy of the network, all of whose convolutions are divided, in uneven parts."""
    model = copy.deepcopy(drawn.model)
    plan = a_plan_for(model, drawn.images(0))
    assert plan.untouched == ()
    assert plan.assignments
    for each in plan.assignments:
        # 3 samples are one part; a module that meets the first sample apart is given the others as well.
        assert len(each.division.parts) > 1 or each.division.batch <= 3
    assert any(each.division.batch == drawn.shape[0] for each in plan.assignments)
    return apply(model, plan)


def training_of(model: nn.Module, drawn: Drawn) -> list[Tensor]:
    """Train a network; return all outputs, gradients of images, parameters, buffers, and what it predicts."""
    learnt = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(learnt, lr=0.05, momentum=0.9) if learnt else None
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        for seed in range(STEPS):
            torch.default_generator.manual_seed(seed)  # of dropout; torch.manual_seed takes a stack each time
            images = drawn.images(seed)
            model.zero_grad()
            y = model(images)
            seen.append(y.detach())
            if y.requires_grad:
                wanted = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
                (y - wanted).square().mean().backward()
            if images.grad is not None:
                seen.append(images.grad)
            if optimizer is not None:
                optimizer.step()
        with torch.no_grad():
            seen.append(model.eval()(drawn.images(STEPS)))
    return seen + [each.detach() for each in (*model.parameters(), *model.buffers())]


def steps_of(tensor: Tensor) -> list[int]:
    """Return its strides but for axes of length 1, where they say nothing and PyTorch's kernels differ."""
    return [step for step, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of its tensor or to 1."""
    differences = [
        (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1)
        for one, other in zip(found, expected, strict=True)
    ]
    return torch.stack(differences).max().item()


@examples(100)
@given(architectures(torch.float64))
def test_random_networks_learn_what_their_twins_learn(drawn: Drawn) -> None:
    found, expected = (training_of(each, drawn) for each in (divided(drawn), drawn.model))

    assert difference(found, expected) <= BOUND
    assert [*map(steps_of, found)] == [*map(steps_of, expected)]


# The same networks every time: of some, rounding decides far more than itself, such as which side of a kink
# of ReLU or MaxPool a number lies on, or what a norm makes of images that are nearly even.
@settings(max_examples=25, derandomize=True)
@given(architectures(torch.float32))
def test_in_float32_they_are_as_near_to_float64_as_their_twins(drawn: Drawn) -> None:
    in_float64 = dataclasses.replace(drawn, dtype=torch.float64)
    exact = training_of(copy.deepcopy(drawn.model).double(), in_float64)
    model = divided(drawn)

    lost = difference(training_of(model, drawn), exact)

    assert lost <= FACTOR * max(difference(training_of(drawn.model, drawn), exact), EPSILON)
