"""`make models`: public models from packages, divided by hand and trained beside their unpatched twins.

Every convolution runs in uneven parts by different algorithms, forward and backward, in float64. After three
steps of SGD with momentum all parameters and statistics must be those of the twin to 1e-8.
"""

import argparse
import copy
import dataclasses
import fnmatch
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.by_hand import a_plan_for
from bench.models.zoo import BATCH, Entry, a_sample, entries
from mucudnn.modules import convolutions, kind_of
from mucudnn.patching import apply
from mucudnn.report.table import table

BOUND = 1e-8
"""Of the largest difference, relative to the largest number of its tensor or to 1."""

_HEADER = ("model", "convolutions", "of kinds", "sites", "divided", "left", "largest difference", "verdict")


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of one model.

    Attributes:
        entry: the model.
        kinds: its classes of convolutions.
        convolutions: how many it has.
        sites: how many ops of convolutions are in the plan.
        divided: how many of them run in several parts.
        left: how many convolutions run as before.
        difference: the largest one after the last step.
    """

    entry: Entry
    kinds: tuple[str, ...]
    convolutions: int
    sites: int
    divided: int
    left: int
    difference: float

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        return (
            f"{self.entry.package} {self.entry.name}",
            str(self.convolutions),
            " ".join(self.kinds),
            str(self.sites),
            str(self.divided),
            str(self.left),
            f"{self.difference:.1e}",
            "equal" if self.difference <= BOUND else "DIFFERENT",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all models and print what came of them; return 1 if one differs."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [
        entry
        for entry in entries()
        if any(fnmatch.fnmatchcase(f"{entry.package} {entry.name}", each) for each in options.only)
    ]
    found = []
    for number, entry in enumerate(chosen, 1):
        start = time.perf_counter()
        found.append(_train(entry, options.steps))
        seconds = time.perf_counter() - start
        print(f"{number:3d}/{len(chosen)}  {'  '.join(found[-1].row)}  ({seconds:.0f} s)", flush=True)
    text = _text(found, options.steps)
    print(f"\n{text}")
    if options.output is not None:
        Path(options.output).write_text(text, encoding="utf-8")
    return int(any(each.difference > BOUND for each in found))


def _train(entry: Entry, steps: int) -> Found:
    """Train a divided model and its twin on the same random data, from the same random state."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        twin = entry.build().double()
        generator = torch.Generator().manual_seed(1)
        sample = a_sample(entry, generator)
        model = copy.deepcopy(twin)
        plan = a_plan_for(model, sample)
        apply(model, plan)
        trained = [_Trained(each) for each in (model, twin)]
        difference = 0.0
        for step in range(steps):
            images = a_sample(entry, generator)
            losses = [each.step(images, seed=step) for each in trained]
            difference = max(_difference(*losses), difference)
    difference = max(difference, *(map(_difference, _state(model), _state(twin))))
    modules = convolutions(model)
    kinds = {kind.base.__name__ for each in modules.values() if (kind := kind_of(each)) is not None}
    divided = sum(not each.division.is_undivided for each in plan.assignments)
    return Found(
        entry,
        tuple(sorted(kinds)),
        len(modules),
        len(plan.assignments),
        divided,
        len(plan.untouched),
        difference,
    )


class _Trained:
    """A model that is being trained."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.train()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(self, images: Tensor, seed: int) -> Tensor:
        """Take a step towards random outputs; return the mean square of what is missing."""
        torch.manual_seed(seed)  # dropout is the same
        self._optimizer.zero_grad()
        outputs = _tensors(self._model(images))
        loss = torch.stack([(each - torch.randn_like(each)).square().mean() for each in outputs]).sum()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = list(output.values()) if isinstance(output, dict) else list(output)  # type: ignore[call-overload]
    return [tensor for value in values for tensor in _tensors(value)]


def _state(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def _difference(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    scale = max(other.abs().max().item(), 1.0)
    return (one.double() - other.double()).abs().max().item() / scale


def _text(found: Sequence[Found], steps: int) -> str:
    equal = sum(each.difference <= BOUND for each in found)
    lines = table(_HEADER, "<><>>>><", [("", [each.row for each in found])])
    return (
        f"{equal} of {len(found)} models equal their twins to {BOUND:.0e} after {steps} steps of SGD "
        f"(float64, batch {BATCH}, uneven parts, torch {torch.__version__}).\n\n" + "\n".join(lines) + "\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.models", description=__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names, as in a shell")
    parser.add_argument("--steps", type=int, default=3, help="of training (default: %(default)s)")
    parser.add_argument("--output", default=None, help="file for the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
