"""A training step as one call, to be timed, weighed and compared."""

import copy
import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from bench.data import load
from bench.differences import Differences, largest
from bench.networks import resnet18
from mucudnn.backends import Backend, backend_of
from mucudnn.division import Division
from mucudnn.patching.applying import apply
from mucudnn.plan import Assignment, Plan
from mucudnn.profile import Candidate


class TrainingStep:
    """Forward, loss, backward and update of one model on one mini-batch."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        """Take the model in training mode, images (n, c, h, w) and labels (n,) or (n, h, w)."""
        self.model = model
        self.images = images
        self.labels = labels
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def gradients(self) -> Tensor:
        """Compute the gradients of all parameters; return the scores, shape (n, classes[, h, w])."""
        self._optimizer.zero_grad(set_to_none=True)
        scores: Tensor = self.model(self.images)
        F.cross_entropy(scores, self.labels).backward()
        return scores.detach()

    def __call__(self) -> None:
        """Run the step."""
        self.gradients()
        self._optimizer.step()


def digits_step(batch: int, channels_last: bool) -> TrainingStep:
    """Return the step of a fresh ResNet-18 on the first digits; equal arguments give equal weights."""
    torch.manual_seed(0)
    model = resnet18().train()
    digits = load()
    images, labels = digits.train_images[:batch], digits.train_labels[:batch]
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub forgets it
        images = images.to(memory_format=torch.channels_last)
    return TrainingStep(model, images, labels)


def copy_of(step: TrainingStep) -> TrainingStep:
    """Return a step with a copy of the model, so that neither changes the other."""
    return TrainingStep(copy.deepcopy(step.model), step.images, step.labels)


def double(step: TrainingStep) -> TrainingStep:
    """Return a step with a copy of the model in float64; the weights are equal."""
    return TrainingStep(copy.deepcopy(step.model).double(), step.images.double(), step.labels)


class Weighed:
    """A step with its operands in place, for `FootprintMeter`."""

    result_bytes = 0

    def __init__(self, model: nn.Module, step: Callable[[], None], plan: object) -> None:
        """Take the step, and the text of a plan by which its model is patched, or None."""
        self._step = step
        if plan is not None:
            made = Plan.from_text(str(plan))
            here = backend_of(f"{made.environment.backend}:").environment()  # another allocator, nothing else
            apply(model, dataclasses.replace(made, environment=here))

    def run(self) -> None:
        """Run the step; whoever weighs has switched gradients off."""
        with torch.enable_grad():
            self._step()


class WeighedStep(Weighed):
    """The step of `digits_step`."""

    def __init__(self, payload: Mapping[str, object]) -> None:
        """Take the values that `bench.digits` gives: batch, layout, and a plan's text or None."""
        step = digits_step(int(str(payload["batch"])), bool(payload["channels_last"]))
        super().__init__(step.model, step, payload["plan"])


def in_float64(plan: Plan) -> Plan:
    """Return the plan with the same divisions for tensors of float64, which take twice the workspace.

    Parts whose algorithm is for float32 alone, such as a matrix unit's, run PyTorch's own.
    """
    backend = backend_of(f"{plan.environment.backend}:")
    return dataclasses.replace(
        plan,
        limit_bytes=2 * plan.limit_bytes,
        assignments=tuple(_in_float64(backend, each) for each in plan.assignments),
    )


def _in_float64(backend: Backend, assigned: Assignment) -> Assignment:
    problem = dataclasses.replace(assigned.problem, dtype="float64")

    def doubled(candidate: Candidate) -> Candidate:
        able = backend.computes(problem.with_batch(candidate.batch), candidate.algorithm)
        runs = candidate if able else Candidate(backend.own, candidate.batch, candidate.time_s, 0)
        return dataclasses.replace(runs, workspace_bytes=2 * candidate.workspace_bytes)

    parts = [doubled(part) for part in assigned.division.parts]
    names = list(dict.fromkeys(part.algorithm for part in parts))
    candidates = {(each.algorithm, each.batch): each for each in map(doubled, assigned.candidates)}
    return dataclasses.replace(
        assigned,
        problem=problem,
        division=Division(tuple(sorted(parts, key=lambda part: names.index(part.algorithm)))),
        candidates=tuple(candidates.values()),
    )


def differences(one: TrainingStep, other: TrainingStep) -> Differences:
    """Run forward and backward of both models, which must have equal weights, and compare."""
    first, second = one.gradients(), other.gradients()
    grads = zip(one.model.parameters(), other.model.parameters(), strict=True)
    buffers = zip(one.model.buffers(), other.model.buffers(), strict=True)
    return Differences(
        outputs=largest([_difference(first, second)]),
        gradients=largest(_difference(_gradient(a), _gradient(b)) for a, b in grads),
        statistics=largest(_difference(a, b) for a, b in buffers),
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ValueError("Every parameter must have a gradient after a backward pass, but one has none.")
    return parameter.grad


def _difference(one: Tensor, other: Tensor) -> float:
    most = other.abs().max().item()
    distance = (one.double() - other.double()).abs().max().item()
    return distance / most if most else distance
