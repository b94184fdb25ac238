"""One model trained beside its twins: how far apart they end."""

import copy
import dataclasses
import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bench.by_hand import a_plan_for
from bench.models.zoo import Entry, a_sample
from bench.training import perturbed
from mucudnn.convolutions.modules import convolutions, kind_of
from mucudnn.errors import UntunedWarning
from mucudnn.patching.applying import apply
from mucudnn.plan import Plan

BOUND = 1e-8
"""Of the difference in float64."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of one model.

    A difference is the largest one between two runs, over the losses of all steps and over all parameters and
    buffers after the last step, each relative to the largest number of its tensor or to 1.

    Attributes:
        entry: the model.
        kinds: its classes of convolutions.
        convolutions: how many it has.
        sites: how many ops of convolutions are in the plan.
        divided: how many of them run in several parts.
        left: how many convolutions run as before.
        in_float64: the difference between the divided model and its twin in float64.
        in_float32: the same in float32.
        perturbed: the differences between the twin in float32 and copies of it, whose weights were perturbed
            by 1e-7 before the first step.
    """

    entry: Entry
    kinds: tuple[str, ...]
    convolutions: int
    sites: int
    divided: int
    left: int
    in_float64: float
    in_float32: float
    perturbed: tuple[float, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the divided model ends where its twin does, in float64."""
        return self.in_float64 <= BOUND

    @property
    def farther(self) -> int:
        """How many of the perturbed copies end at least as far away as the divided model, in float32."""
        return sum(each >= self.in_float32 for each in self.perturbed)

    @property
    def is_within(self) -> bool:
        """Whether a perturbed copy ends at least as far away as the divided model, in float32."""
        return self.farther > 0 and math.isfinite(self.in_float32)


def compare(entry: Entry, steps: int, twins: int) -> Found:
    """Train a model divided and as it is, in both precisions, and `twins` perturbed copies in float32.

    All start from the same weights, and see the same random data and the same random state.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        warnings.simplefilter("error", UntunedWarning)  # nothing runs as before unseen
        model = entry.build()
        generator = torch.Generator().manual_seed(1)
        sample, *batches = (a_sample(entry, generator) for _ in range(steps + 1))
        plan, twin, divided = _beside_its_twin(copy.deepcopy(model).double(), sample, batches)
        in_float64 = _difference(divided, twin)
        sample, *batches = (each.float() for each in (sample, *batches))
        _, twin, divided = _beside_its_twin(model, sample, batches)
        others = (_train(perturbed(model, seed), batches) for seed in range(1, twins + 1))
        spread = tuple(_difference(other, twin) for other in others)
    modules = convolutions(model)
    kinds = {kind.base.__name__ for each in modules.values() if (kind := kind_of(each)) is not None}
    return Found(
        entry,
        tuple(sorted(kinds)),
        len(modules),
        len(plan.assignments),
        sum(not each.division.is_undivided for each in plan.assignments),
        len(plan.untouched),
        in_float64,
        _difference(divided, twin),
        spread,
    )


def _beside_its_twin(
    model: nn.Module, sample: Tensor, batches: Sequence[Tensor]
) -> tuple[Plan, list[Tensor], list[Tensor]]:
    """Return a plan, what training makes of a copy of the model, and of a copy divided by that plan."""
    divided = copy.deepcopy(model)
    plan = a_plan_for(divided, sample)
    apply(divided, plan)
    return plan, _train(copy.deepcopy(model), batches), _train(divided, batches)


def _train(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """Train `model` in place towards random outputs; return the loss of each step, parameters and buffers.

    The loss is the mean square of what is missing, before the step changed the weights.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for seed, images in enumerate(batches):
        torch.manual_seed(seed)  # dropout and wanted outputs are the same for all
        optimizer.zero_grad()
        outputs = _tensors(model(images))
        loss = torch.stack([(each - torch.randn_like(each)).square().mean() for each in outputs]).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))]


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = list(output.values()) if isinstance(output, dict) else list(output)  # type: ignore[call-overload]
    return [tensor for value in values for tensor in _tensors(value)]


def _difference(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of its tensor or to 1; inf for NaN."""
    found = [
        (one.double() - other.double()).abs().max().item() / max(other.abs().max().item(), 1.0)
        for one, other in zip(ones, others, strict=True)
        if other.numel()
    ]
    return math.inf if any(math.isnan(each) for each in found) else max(found)
