"""`mucudnn tune`: from a model to a plan."""

import time
from collections.abc import Iterator
from pathlib import Path

import click

from mucudnn.choices import PREFIX, Mode, Search
from mucudnn.cli.model import Shapes, autocasting, device_of_backend, load_model, ready_on_inputs
from mucudnn.cli.options import (
    FILE,
    FiniteRange,
    NewFile,
    Target,
    autocast_option,
    brief_option,
    channels_last_option,
    check_files,
    check_types,
    dtype_option,
    inputs_option,
    json_option,
    plot_option,
    policy_option,
    size,
    target_argument,
)
from mucudnn.cli.output import others_on_standard_error, say, telling_what_is_kept
from mucudnn.cli.show import print_plan
from mucudnn.errors import OptionError
from mucudnn.plan import Plan
from mucudnn.report import draw_plan
from mucudnn.store import MemoryStore, Store, open_store


@click.command("tune", short_help="Tune a model: print its plan, save it.")
@target_argument
@inputs_option
@click.option(
    "--workspace-limit", "--limit", "limit_bytes", type=size, required=True, metavar="SIZE",
    help="Most workspace of a convolution, or of all together with --mode sharing: 16MiB, 1.5GiB, 512KB.",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice([str(mode) for mode in Mode]), default=str(Mode.REUSE), show_default=True,
    help="reuse: the limit is for each convolution, and they take turns in one buffer. sharing: it is for "
    "the sum, and each has a buffer of its own, which is often slower.",
)  # fmt: skip
@policy_option
@click.option(
    "--search", type=click.Choice([str(search) for search in Search]), default=str(Search.HEURISTIC),
    show_default=True, help="Which algorithms are tried: those that usually win, or all that may.",
)  # fmt: skip
@click.option(
    "--max-error", type=FiniteRange(min=0), metavar="ERROR",
    help="Largest error of an algorithm, relative to float64, such as 2e-6.  [default: the backend's bound]",
)  # fmt: skip
@click.option("--eval", "is_eval", is_flag=True, help="Tune for inference: the forward pass alone.")
@dtype_option
@autocast_option
@channels_last_option
@click.option(
    "--backend", default="auto", show_default=True, metavar="NAME",
    help="auto: where CALLABLE puts the model, usually cpu. cudnn: the GPU, to which the model is moved. "
    "replay:NAME: a recording that mucudnn info lists, or replay:FILE: a store that was filled elsewhere; "
    "nothing is measured, and all that it holds is tried, whatever --search says.",
)  # fmt: skip
@click.option("--store", type=FILE, help="File of the measurements.  [default: as mucudnn info says]")
@click.option(
    "--again", is_flag=True,
    help="Measure these convolutions anew, whatever the store knows, for example after a busy time.",
)  # fmt: skip
@click.option("-o", "--output", type=NewFile(), help="Where to save the plan; without it, it is only shown.")
@plot_option
@brief_option
@json_option
def tune_command(
    target: Target,
    shapes: Shapes,
    limit_bytes: int,
    mode: str,
    policy: str,
    search: str,
    max_error: float | None,
    is_eval: bool,
    dtype: str | None,
    autocast: str | None,
    channels_last: bool,
    backend: str,
    store: Path | None,
    again: bool,
    output: Path | None,
    plot: Path | None,
    brief: bool,
    as_json: bool,
) -> None:
    """Time the algorithms of each convolution of a model, choose the fastest within a limit, print the plan.

    CALLABLE is called without arguments and returns the model (a model itself will do, too). It is found as
    Python finds modules, the current directory first. The model is tuned for training unless --eval is given,
    on inputs of random values. Only -o saves the plan; mucudnn.apply(model, mucudnn.Plan.load(FILE)) uses it.

    \b
    Example:
      mucudnn tune torchvision.models:resnet18 --input 32x3x224x224 --workspace-limit 64MiB -o plan.json
    """
    check_files(output, plot)
    check_types(dtype, autocast)
    _check_backend(backend, store, again=again)
    start = time.perf_counter()
    is_replay = backend.startswith(PREFIX)
    kept: Store = MemoryStore() if is_replay else open_store(store)
    with kept as opened, telling_what_is_kept(opened, again=again), others_on_standard_error():
        from mucudnn.tuner import tune  # here, so that help and other commands do not wait for torch

        device = device_of_backend(backend)
        model = load_model(target)
        sample = ready_on_inputs(
            model, shapes, device, is_eval=is_eval, dtype=dtype, autocast=autocast,
            channels_last=channels_last,
        )  # fmt: skip
        with autocasting(model, autocast):
            plan = tune(
                model, sample, limit_bytes, mode=mode, policy=policy, search=search, max_error=max_error,
                backend=backend, store=opened, again=again, progress=True,
            )  # fmt: skip
    seconds = time.perf_counter() - start
    try:
        _keep(plan, output, plot)  # before anything is printed: whoever reads that may leave
    finally:
        print_plan(plan, as_json, brief=brief)
    for line in _how_it_went(seconds, backend, output, plot):
        say(line, as_json)


def _keep(plan: Plan, output: Path | None, plot: Path | None) -> None:
    """Save and draw a plan, as far as that was asked for."""
    if output is not None:
        plan.save(output)
    if plot is not None:
        draw_plan(plan, plot)


def _check_backend(backend: str, store: Path | None, *, again: bool) -> None:
    """Refuse a backend that there is not, and what a recording, which is its own store, has no use for."""
    # here, so that help and other commands do not wait for torch
    from mucudnn.tuning.options import checked_backend

    try:
        checked_backend(backend)
    except OptionError as error:
        raise click.BadParameter(str(error), param_hint="'--backend'") from error
    if backend.startswith(PREFIX) and store is not None:
        raise click.BadParameter("a recording is its own store; leave this out.", param_hint="'--store'")
    if backend.startswith(PREFIX) and again:
        raise click.BadParameter("a recording measures nothing; leave this out.", param_hint="'--again'")


def _how_it_went(seconds: float, backend: str, output: Path | None, plot: Path | None) -> Iterator[str]:
    """Yield what tuning took, and where the plan is."""
    if backend.startswith(PREFIX):
        recording = backend.removeprefix(PREFIX)
        yield f"Answered in {seconds:.1f} s by the recording {recording}; nothing was measured here."
    else:
        yield f"Tuned in {seconds:.1f} s."
    yield "The plan is not saved; -o FILE saves it." if output is None else f"The plan is saved in {output}."
    if plot is not None:
        yield f"It is drawn in {plot}."
