"""Training with and without division: that the losses and the accuracy stay what they are.

The plan is that of the demonstration (`make run` writes it). Three comparisons of runs from equal weights and
data: ten steps in float64; ten steps in float32, beside runs whose weights were perturbed by 1e-7 before the
first step; whole epochs from several random states, with the accuracy on held-out images and the time. All
losses are kept in a file, and drawn.
"""

import argparse
import copy
import dataclasses
import datetime
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from bench.arguments import at_least_one
from bench.commit import commit
from bench.data import Digits, load
from bench.endings import INTERRUPTED
from bench.networks import resnet18
from bench.proof_results import Epochs, Exact, Learnt, Near, Pair, Proof, figure
from bench.steps import in_float64
from bench.training import perturbed, train
from mucudnn import apply
from mucudnn.errors import MucudnnError
from mucudnn.files import is_there
from mucudnn.plan import Plan
from mucudnn.plan_file import encode
from mucudnn.problem import Layout
from mucudnn.report import check_matplotlib, drawing
from mucudnn.version import __version__

_LEARNING_RATE = 0.001
"""Small, because this network magnifies any difference at the start: about a hundredfold a step at 0.02."""

_FAST_RATE = 0.01
_SMALL_BATCH = 16
"""For the accuracy: two epochs are then 186 steps, enough to learn; the plan serves it without measuring.

The rate falls to 0, so that the last steps do not toss the few test images about."""


def main() -> int:
    """Run the comparisons; return 0 if all hold, else 1."""
    options = _parser().parse_args()
    try:
        if not is_there(Path(options.plan)):
            print(f"mucudnn: there must be a plan in {options.plan}, as make run writes it.", file=sys.stderr)
            return 1
        check_matplotlib()
        plan, version = Plan.load(options.plan), commit()
        proof = _proven(_Training(plan), options)
        print(f"All losses: {_kept(proof, plan, version, Path(options.output))}", flush=True)
    except (MucudnnError, OSError) as error:
        print(f"mucudnn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mucudnn: interrupted; the proof was not finished.", file=sys.stderr)
        return INTERRUPTED
    return 0 if proof.holds else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.proof", description=__doc__)
    add = parser.add_argument
    add("--plan", default="build/digits-plan.json", help="plan (default: %(default)s)")
    add("--steps", type=at_least_one, default=10, help="steps of the first two (default: %(default)s)")
    add("--twins", type=at_least_one, default=20, help="perturbed runs (default: %(default)s)")
    add("--epochs", type=at_least_one, default=2, help="of the third (default: %(default)s)")
    add("--seeds", type=at_least_one, default=3, help="random states of the third (default: %(default)s)")
    add("--output", default="build/digits-proof.json", help="file of all losses (default: %(default)s)")
    return parser


def _proven(training: "_Training", options: argparse.Namespace) -> Proof:
    """Run all comparisons, and tell of each as it is there."""
    exact = training.in_float64(options.steps)
    _say(exact.told())
    near = training.in_float32(options.steps, options.twins)
    _say(near.told())
    epochs = training.epochs(options.epochs, options.seeds)
    _say(epochs.told())
    return Proof(exact, near, epochs)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _kept(proof: Proof, plan: Plan, version: str, path: Path) -> str:
    """Write all losses, and a page that draws them beside `path`; return the names of both."""
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench.proof", *sys.argv[1:]]),
        "mucudnn": __version__,
        "commit": version,
        "plan": hashlib.sha256(plan.to_text().encode()).hexdigest(),
        "environment": plan.environment.to_json(),
        "proof": encode(proof),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".html")
    drawing.save(lambda: figure(proof), page, "Training with and without division", proof.told)
    return f"{path}, drawn in {page}"


class _Training:
    """One plan, one kind of model, one set of images."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._digits = load()
        problem = plan.assignments[0].problem
        self._batch = problem.batch
        self._channels_last = problem.layout is Layout.CHANNELS_LAST
        self._model = _model(0)

    def in_float64(self, steps: int) -> Exact:
        """Train both in float64."""
        model = copy.deepcopy(self._model).double()
        patched = self._patched(model, in_float64(self._plan))
        return Exact(self._losses(model, steps), self._losses(patched, steps))

    def in_float32(self, steps: int, twins: int) -> Near:
        """Train both in float32, and perturbed ones."""
        return Near(
            self._losses(copy.deepcopy(self._model), steps),
            self._losses(self._patched(self._model, self._plan), steps),
            tuple(self._losses(perturbed(self._model, seed), steps) for seed in range(1, twins + 1)),
        )

    def epochs(self, epochs: int, seeds: int) -> Epochs:
        """Train both for whole epochs from each random state, in turn; who is first changes."""
        pairs = []
        for seed in range(seeds):
            print(f"  {epochs} epochs from random state {seed} ({seed + 1} of {seeds})", flush=True)
            models = {"unpatched": _model(seed), "divided": self._patched(_model(seed), self._plan)}
            order = reversed(models) if seed % 2 else iter(models)
            runs = {name: self._learnt(models[name], epochs, seed) for name in order}
            pairs.append(Pair(seed, **runs))
        return Epochs(epochs, len(self._digits.test_labels), tuple(pairs))

    def _learnt(self, model: nn.Module, epochs: int, seed: int) -> Learnt:
        start = time.perf_counter()
        ends = []
        run = train(
            model,
            self._digits,
            epochs,
            _SMALL_BATCH,
            seed,
            learning_rate=_FAST_RATE,
            decay=True,
            drop_last=True,
            channels_last=self._channels_last,
            on_step=lambda *_: ends.append(time.perf_counter()),
        )
        return Learnt(run.losses, run.accuracy, ends[-1] - start)

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


def _model(seed: int) -> nn.Module:
    """Return a fresh model; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return resnet18()


def _without_test(digits: Digits) -> Digits:
    """Return the digits with one test image: the losses are wanted, not the accuracy."""
    return dataclasses.replace(digits, test_images=digits.test_images[:1], test_labels=digits.test_labels[:1])


if __name__ == "__main__":
    sys.exit(main())
