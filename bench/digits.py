"""The demonstration: tune a ResNet-18 on real images, divide its convolutions, prove that nothing changed.

Everything that it prints is measured by this run, or read from the store that an earlier run of this
program filled.
"""

import argparse
import dataclasses
import hashlib
import math
import sys
import time
from pathlib import Path

import torch

from bench.arguments import at_least_one, plan_file, size
from bench.data import TRAIN_IMAGES
from bench.differences import Differences
from bench.endings import INTERRUPTED
from bench.steps import TrainingStep, copy_of, differences, digits_step, double, in_float64
from mucudnn import apply, compare, tune
from mucudnn.backends import Backend, Job, backend_of
from mucudnn.choices import Mode, Policy
from mucudnn.cli.output import telling_what_is_kept
from mucudnn.comparing.step_comparison import PairedTimes
from mucudnn.division import undivided
from mucudnn.errors import MucudnnError
from mucudnn.evidence import Evidence
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.plan import Plan
from mucudnn.problem import Layout
from mucudnn.profiling.outcome import Outcome
from mucudnn.profiling.profiler import Profiler
from mucudnn.progress import Progress, progress_for
from mucudnn.report import (
    check_matplotlib,
    draw_comparison,
    draw_plan,
    render_comparison,
    render_plan,
)
from mucudnn.report.steps import describe_factor
from mucudnn.report.words import describe_ms
from mucudnn.sizes import format_bytes
from mucudnn.standing import disturbance
from mucudnn.store import Store, open_store

_UNCAPPED = 1 << 50


def main() -> int:
    """Run the demonstration; return the exit status."""
    options = _parser().parse_args()
    try:
        _demonstrate(options)
    except MucudnnError as error:
        print(f"mucudnn: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        reason = error.strerror or error
        print(f"mucudnn: {error.filename or 'A file'} cannot be used: {reason}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _batch(text: str) -> int:
    """Return a size of a mini-batch, as large as the images that there are allow.

    Raises:
        argparse.ArgumentTypeError: it is too small or too large.
        ValueError: it is no whole number.
    """
    batch = at_least_one(text)
    if batch > TRAIN_IMAGES:
        raise argparse.ArgumentTypeError(f"must be at most {TRAIN_IMAGES}, but got {batch}")
    return batch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.digits", description=__doc__)
    parser.add_argument("--limit", type=size, default="16MiB", help="workspace limit (default: %(default)s)")
    parser.add_argument(
        "--batch", type=_batch, default=64, help=f"mini-batch, {TRAIN_IMAGES} at most (default: %(default)s)"
    )
    parser.add_argument(
        "--mode",
        choices=[str(mode) for mode in Mode],
        default=str(Mode.REUSE),
        help="whether the limit is each convolution's, or that of all together (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=[str(policy) for policy in Policy],
        default=str(Policy.POWER_OF_TWO),
        help="which micro-batch sizes are tried (default: %(default)s)",
    )
    parser.add_argument(
        "--layout",
        choices=[str(layout) for layout in Layout],
        default=str(Layout.CHANNELS_LAST),
        help="of images and filters; in channels_last PyTorch's own is faster, too (default: %(default)s)",
    )
    parser.add_argument("--store", default=None, help="file of profiles (default: the user's cache)")
    parser.add_argument(
        "--again", action="store_true", help="measure anew what the store knows of this model"
    )
    parser.add_argument(
        "--plan",
        type=plan_file,
        default=Path("build/digits-plan.json"),
        help="plan to write, and pages beside it (default: %(default)s)",
    )
    return parser


def _demonstrate(options: argparse.Namespace) -> None:
    check_matplotlib()
    options.plan.parent.mkdir(parents=True, exist_ok=True)  # before all the work
    step = digits_step(options.batch, options.layout == Layout.CHANNELS_LAST)
    threads = torch.get_num_threads()
    _say(
        f"ResNet-18 (32x32), training step on {len(step.images)} handwritten digits, {options.layout}, "
        f"{threads} {'thread' if threads == 1 else 'threads'}, limit {format_bytes(options.limit)}."
    )
    with open_store(options.store) as store, telling_what_is_kept(store, again=options.again):
        plan, cost = _tuned(step, store, options)
        _say(cost.told())
        _keep(plan, options.plan)
        shown = _with_bases(plan, store)
    _say(render_plan(shown))
    page = options.plan.with_suffix(".html")
    draw_plan(shown, page)
    _say(f"Drawn, with that table: {page}.")
    patched = copy_of(step)
    apply(patched.model, plan)
    times = _show_step(patched, page.with_stem(f"{page.stem}-step"))
    memory = _show_memory(plan, options)
    exact = _show_proof(step, patched, plan)
    _say(f"\nIn short: {_time_in_short(times, cost)}")
    proof = f"Computed in float64 it differs by {exact:.1e} of the largest value at most."
    _say(proof if memory is None else f"{memory} {proof}")
    if (doubt := disturbance(shown)) is not None:
        _say(f"{doubt} Run the same command with --again while the machine is idle.")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What tuning took.

    Attributes:
        seconds: of this run.
        measured: how many candidates, divisions and pairs of whole calls it has begun to measure.
        known: how many records the store had before that may have spared it some; perhaps of other models.
    """

    seconds: float
    measured: int
    known: int

    def told(self) -> str:
        """Return it as a sentence."""
        known = f"; known before: {self.known}, perhaps of other models" if self.known else ""
        return f"Tuned in {self.seconds:.0f} s. Candidates and divisions measured: {self.measured}{known}."


class _CountingProgress:
    """Progress as it is shown, and how much was measured in the end."""

    def __init__(self, shown: Progress) -> None:
        self.begin, self.at = shown.begin, shown.at
        self.measured = 0
        self._shown = shown

    def end(self, measured: int) -> None:
        """Remember the number, and pass it on."""
        self.measured = measured
        self._shown.end(measured)


def _tuned(step: TrainingStep, store: Store, options: argparse.Namespace) -> tuple[Plan, Cost]:
    """Return the plan of the model, and what it took to find it."""
    known, start = 0 if options.again else store.count(), time.perf_counter()
    with progress_for(wish=True) as shown:
        counting = _CountingProgress(shown)
        plan = tune(
            step.model, step.images, options.limit,
            mode=options.mode, policy=options.policy, store=store, again=options.again, progress=counting,
        )  # fmt: skip
    return plan, Cost(time.perf_counter() - start, counting.measured, known)


def _keep(plan: Plan, path: Path) -> None:
    """Save the plan, and say whether it is the one of the run before."""
    text = plan.to_text()
    former = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    plan.save(path)
    again = "" if former is None else ", the same as before" if former == text else ", another than before"
    _say(f"Plan: {path}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}{again}.")


def _with_bases(plan: Plan, store: Store) -> Plan:
    """Return the plan with what PyTorch's own takes where the limit forbade the tuner to run it.

    The model without mucudnn runs it all the same; so it is measured here, without a limit, beside what
    runs now.
    """
    backend = backend_of(f"{plan.environment.backend}:")
    profiler = Profiler(LiveMeasurer(backend), store, _UNCAPPED, Policy.UNDIVIDED)
    assignments = []
    for assigned in plan.assignments:
        evidence = assigned.evidence
        if evidence is not None and evidence.reference is None:
            own = undivided(backend.own, assigned.problem.batch)
            seen = profiler.compare(assigned.problem, [own, assigned.division])
            evidence = _against(own.key, assigned.division.key, seen, evidence)
        assignments.append(dataclasses.replace(assigned, evidence=evidence))
    return dataclasses.replace(plan, assignments=tuple(assignments))


def _against(own: str, division: str, seen: Outcome, evidence: Evidence) -> Evidence:
    return dataclasses.replace(
        evidence,
        reference=seen.estimates[own],
        chosen=seen.estimates[division],
        verdict=seen.verdict(own, division),
        speedups=seen.speedups(own),
        others=seen.others,
        reference_workspace_bytes=seen.workspaces.get(own),
    )


def _show_step(patched: TrainingStep, page: Path) -> PairedTimes:
    """Time a step with the plan and without it, show and draw it, and return the times of the whole step."""
    step = copy_of(patched)
    found = compare(step.model, step, progress=True)
    _say("\nThe whole training step: forward, loss, backward, update.")
    _say(render_comparison(found))
    draw_comparison(found, page)
    _say(f"Drawn, with that table: {page}.")
    return found.step


def _time_in_short(times: PairedTimes, cost: Cost) -> str:
    """Return what the step takes, and when tuning is paid back: at least, if an earlier run bore a part."""
    told = (
        f"a training step takes {describe_ms(times.now)} ms instead of {describe_ms(times.before)}, "
        f"{describe_factor(times.speedup)} times as fast."
    )
    if not cost.measured:
        return f"{told}\nNothing was measured for the plan: what tuning takes is told by a run with --again."
    paid = times.break_even(cost.seconds)
    steps, low, high = (
        f"{each:.0f}" if math.isfinite(each) else "∞" for each in (paid.median, paid.low, paid.high)
    )
    after = f"{'at least ' if cost.known else ''}{steps} [{low}, {high}] steps"
    return f"{told}\nThe {cost.seconds:.0f} s of tuning are paid back after {after}."


def _show_memory(plan: Plan, options: argparse.Namespace) -> str | None:
    """Weigh both steps in a process of their own: the most memory beside what stood there before.

    Returns:
        Both weights in a sentence; None if one could not be measured.
    """
    backend = backend_of(f"{plan.environment.backend}:")
    payload = {"batch": options.batch, "channels_last": options.layout == Layout.CHANNELS_LAST}
    unpatched = _weigh(backend, {**payload, "plan": None})
    patched = _weigh(backend, {**payload, "plan": plan.to_text()})
    workspaces = [each.evidence.workspace_bytes or 0 for each in plan.assignments if each.evidence]
    _say("\nPeak memory of the step (activations, gradients and workspace), each in a fresh process:")
    weights = [unpatched, patched]
    before, now = ("could not be measured" if each is None else format_bytes(each) for each in weights)
    _say(f"  unpatched  {before}\n  patched    {now}")
    _say(
        f"  largest workspace of a convolution, as measured: {format_bytes(max(workspaces, default=0))}, "
        f"limit {format_bytes(options.limit)}"
    )
    return None if None in weights else f"Its peak memory is {now} instead of {before}."


def _weigh(backend: Backend, payload: dict[str, object]) -> int | None:
    return backend.footprint(Job("bench.steps:WeighedStep", payload), _UNCAPPED)


def _show_proof(unpatched: TrainingStep, patched: TrainingStep, plan: Plan) -> float:
    """Compare both models after one forward and backward pass, and tell what rounding alone does.

    A ReLU turns a rounding into a jump, so in float32 gradients differ by far more than their rounding,
    between any two ways to compute them. In float64 the same divisions show that nothing else differs.

    Returns:
        The largest difference in float64.
    """
    exact = double(unpatched)
    exact_patched = double(unpatched)
    apply(exact_patched.model, in_float64(plan))
    columns = {
        "float32": differences(copy_of(patched), copy_of(unpatched)),
        "float64": differences(exact_patched, copy_of(exact)),
        "unpatched float32 - float64": differences(copy_of(unpatched), exact),
    }
    _say("\nLargest differences after one pass, relative to the largest value, patched - unpatched:")
    _say(f"  {'':22}" + "".join(f"{name:>12}" if len(name) < 12 else f"{name:>32}" for name in columns))
    for name in (field.name for field in dataclasses.fields(Differences)):
        label = {"statistics": "batch-norm statistics"}.get(name, name)
        numbers = [getattr(column, name) for column in columns.values()]
        _say(f"  {label:22}{numbers[0]:12.1e}{numbers[1]:12.1e}{numbers[2]:32.1e}")
    _say(
        "  The proof is the column of float64: there the plan runs too, and nothing but rounding differs\n"
        "  (what is for float32 alone, bf16x3 and bf16x2, is PyTorch's own there). In float32 rounding also\n"
        "  decides which ReLUs pass a value near zero, so gradients differ more, and likewise those of the\n"
        "  unpatched model from its own in float64: see the last column."
    )
    found = columns["float64"]
    return max(found.outputs, found.gradients, found.statistics)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
