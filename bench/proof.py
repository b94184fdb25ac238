"""Training with and without division: that the losses and the accuracy stay what they are.

The plan is that of the demonstration (`make run` writes it). Three comparisons, each of two runs from one
seed: ten steps in float64; ten steps in float32, beside runs whose weights were perturbed by 1e-7 before
the first step; whole epochs with the accuracy on held-out images.
"""

import argparse
import copy
import dataclasses
import sys

import torch
from torch import nn

from bench.data import Digits, load
from bench.networks import resnet18
from bench.steps import in_float64
from bench.training import perturbed, train
from mucudnn import apply
from mucudnn.errors import MucudnnError
from mucudnn.plan import Plan
from mucudnn.problem import Layout

_BOUND = 1e-8
"""Largest relative difference of a loss in float64."""

_LEARNING_RATE = 0.001
"""Small, because this network magnifies any difference at the start: about a hundredfold a step at 0.02."""

_FAST_RATE = 0.01
_SMALL_BATCH = 16
"""For the accuracy: two epochs are then 186 steps, enough to learn; the plan serves it without measuring.

The rate falls to 0, so that the last steps do not toss the few test images about."""


def main() -> int:
    """Run the comparisons; return 0 if all hold, else 1."""
    parser = argparse.ArgumentParser(prog="bench.proof", description=__doc__)
    parser.add_argument("--plan", default="build/digits-plan.json", help="plan (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of the first two (default: %(default)s)")
    parser.add_argument("--twins", type=int, default=20, help="perturbed runs (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="of the third (default: %(default)s)")
    options = parser.parse_args()
    try:
        proof = _Proof(Plan.load(options.plan))
        verdicts = [
            proof.in_float64(options.steps),
            proof.in_float32(options.steps, options.twins),
            proof.accuracy(options.epochs),
        ]
    except (MucudnnError, OSError) as error:
        print(f"mucudnn: {error}", file=sys.stderr)
        return 1
    return 0 if all(verdicts) else 1


class _Proof:
    """One plan, one model, one set of images."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._digits = load()
        problem = plan.assignments[0].problem
        self._batch = problem.batch
        self._channels_last = problem.layout is Layout.CHANNELS_LAST
        torch.manual_seed(0)
        self._model = resnet18()

    def in_float64(self, steps: int) -> bool:
        """Train both in float64; tell whether their losses agree to 1e-8."""
        model = copy.deepcopy(self._model).double()
        patched = self._patched(model, in_float64(self._plan))
        plain, divided = self._losses(model, steps), self._losses(patched, steps)
        worst = max(abs(a - b) / abs(a) for a, b in zip(plain, divided, strict=True))
        print(f"float64, {steps} steps: losses differ by at most {worst:.1e}, bound {_BOUND:.0e}", flush=True)
        return worst <= _BOUND

    def in_float32(self, steps: int, twins: int) -> bool:
        """Train both in float32; tell whether they lie as near as perturbed runs lie, at every step."""
        plain = self._losses(copy.deepcopy(self._model), steps)
        divided = self._losses(self._patched(self._model, self._plan), steps)
        others = [self._losses(perturbed(self._model, seed), steps) for seed in range(1, twins + 1)]
        print(f"float32, {steps} steps: distance of the loss from the unpatched run's", flush=True)
        print(f"  {'step':>4}  {'loss':>8}  {'divided':>9}  {'largest of ' + str(twins) + ' perturbed':>24}")
        within = []
        for step, (loss, ours) in enumerate(zip(plain, divided, strict=True)):
            spread = max(abs(other[step] - loss) for other in others)
            within.append(abs(ours - loss) <= spread)
            print(f"  {step:4}  {loss:8.5f}  {abs(ours - loss):9.1e}  {spread:24.1e}", flush=True)
        print(f"  within the spread at {sum(within)} of {steps} steps", flush=True)
        return all(within)

    def accuracy(self, epochs: int) -> bool:
        """Train both for whole epochs; tell whether the accuracies differ by at most one percent."""
        runs = {}
        for name, model in (
            ("unpatched", copy.deepcopy(self._model)),
            ("divided", self._patched(self._model, self._plan)),
        ):
            runs[name] = train(
                model,
                self._digits,
                epochs,
                _SMALL_BATCH,
                0,
                learning_rate=_FAST_RATE,
                decay=True,
                drop_last=True,
                channels_last=self._channels_last,
            )
            right = round(runs[name].accuracy * len(self._digits.test_labels))
            print(
                f"{name}, {epochs} epochs: {runs[name].accuracy:.2%} of {len(self._digits.test_labels)} "
                f"held-out images right ({right}), last loss {runs[name].losses[-1]:.4f}",
                flush=True,
            )
        return abs(runs["unpatched"].accuracy - runs["divided"].accuracy) <= 0.01

    def _losses(self, model: nn.Module, steps: int) -> tuple[float, ...]:
        epochs = -(-steps * self._batch // len(self._digits.train_labels)) + 1
        run = train(
            model,
            _without_test(self._digits),
            epochs,
            self._batch,
            0,
            learning_rate=_LEARNING_RATE,
            steps=steps,
            drop_last=True,
            channels_last=self._channels_last,
        )
        return run.losses

    def _patched(self, model: nn.Module, plan: Plan) -> nn.Module:
        return apply(copy.deepcopy(model), plan)


def _without_test(digits: Digits) -> Digits:
    """Return the digits with one test image: the losses are wanted, not the accuracy."""
    return dataclasses.replace(digits, test_images=digits.test_images[:1], test_labels=digits.test_labels[:1])


if __name__ == "__main__":
    sys.exit(main())
