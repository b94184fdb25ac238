"""`mucudnn compare`: what a saved plan is worth in a whole pass of its model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mucudnn.cli.model import Shapes, autocasting, device_of_backend, load_model, ready_on_inputs
from mucudnn.cli.options import (
    PLAN,
    NewFile,
    Target,
    autocast_option,
    channels_last_option,
    check_files,
    check_types,
    dtype_option,
    inputs_option,
    json_option,
    plot_option,
    target_argument,
)
from mucudnn.cli.output import (
    failing_as,
    others_on_standard_error,
    print_json,
    print_report,
    report_width,
    say,
)
from mucudnn.intervals import FEWEST_SAMPLES
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp
from mucudnn.report import comparison_as_json, draw_comparison, render_comparison

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mucudnn.comparing.step_comparison import StepComparison


@click.command("compare", short_help="Time a model with a saved plan and without it.")
@target_argument
@inputs_option
@click.option(
    "--plan", "path", type=PLAN, required=True, metavar="PLAN",
    help="What mucudnn tune -o has saved, for the same model, inputs, type and layout.",
)  # fmt: skip
@click.option(
    "--eval", "must_infer", is_flag=True, help="Accept only a plan for inference.  [default: either kind]"
)
@dtype_option
@autocast_option
@channels_last_option
@click.option(
    "--rounds", type=click.IntRange(min=FEWEST_SAMPLES),
    help="Rounds, each a pass with the plan and one without; as many more rounds time each convolution.  "
    "[default: as many as take 10 s, 20 to 200]",
)  # fmt: skip
@click.option(
    "-o", "--output", type=NewFile(),
    help="Where to save the settled plan: with PyTorch's own put back where it was faster and fits.",
)  # fmt: skip
@plot_option
@json_option
def compare_command(
    target: Target,
    shapes: Shapes,
    path: Path,
    must_infer: bool,
    dtype: str | None,
    autocast: str | None,
    channels_last: bool,
    rounds: int | None,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Time a whole pass of a model with a saved plan and without it, in turns, and each convolution in it.

    A plan for training is tried in forward and backward passes, one for inference in forward passes, on
    inputs of random values. Without the plan, PyTorch's own convolutions take any workspace. Loss,
    optimiser and reading of data are left out: mucudnn.compare(model, step) times a step of your program
    with all that belongs to it.

    \b
    Example:
      mucudnn compare torchvision.models:resnet18 --input 32x3x224x224 --plan plan.json
    """
    check_files(output, plot)
    check_types(dtype, autocast)
    plan = Plan.load(path)
    with others_on_standard_error():
        # here, so that help and other commands do not wait for torch
        from mucudnn.comparing.steps import compare
        from mucudnn.patching.applying import apply

        device = device_of_backend(plan.environment.backend)
        model = load_model(target)
        is_eval = is_for_inference(plan, model)
        if must_infer and not is_eval:
            raise click.BadParameter(
                "the plan is for training; leave this out, or tune with --eval.", param_hint="'--eval'"
            )
        inputs = ready_on_inputs(
            model, shapes, device, is_eval=is_eval, dtype=dtype, autocast=autocast,
            channels_last=channels_last,
        )  # fmt: skip
        apply(model, plan)
        forward = _forward(model, inputs, autocast)
        run = _inference(forward) if is_eval else _training(model, forward)
        found = compare(model, run, rounds=rounds, progress=True)
    try:
        _keep(found, output, plot)  # before anything is printed: whoever reads that may leave
    finally:
        _print(found, as_json=as_json)
    if output is not None:
        what = "settled plan" if found.settled is not found.plan else "plan, unchanged,"
        say(f"The {what} is saved in {output}.", as_json)
    if plot is not None:
        say(f"It is drawn in {plot}.", as_json)


def _keep(found: "StepComparison", output: Path | None, plot: Path | None) -> None:
    """Save the settled plan and draw the comparison, as far as that was asked for."""
    try:
        if output is not None:
            found.settled.save(output)
    finally:
        if plot is not None:
            draw_comparison(found, plot)


def _print(found: "StepComparison", *, as_json: bool) -> None:
    if as_json:
        print_json(comparison_as_json(found))
    else:
        print_report(render_comparison(found, width=report_width()))


def is_for_inference(plan: Plan, model: "nn.Module") -> bool:
    """Return whether a plan has forward passes alone, which of a transposed convolution are its dgrads."""
    from mucudnn.convolutions.modules import kind_of

    kinds = {path: kind_of(module) for path, module in model.named_modules()}
    transposed = {path for path, kind in kinds.items() if kind is not None and kind.is_transposed}
    return all(site.op is (ConvOp.DGRAD if site.path in transposed else ConvOp.FPROP) for site in plan.sites)


def _forward(model: "nn.Module", inputs: "tuple[Tensor, ...]", autocast: str | None) -> Callable[[], object]:
    """Return a forward pass, in autocast if that is asked for."""

    def run() -> object:
        """Run it, and return what the model does."""
        with autocasting(model, autocast):
            return model(*inputs)

    return run


def _inference(forward: Callable[[], object]) -> Callable[[], None]:
    """Return a forward pass without gradients."""
    import torch

    def run() -> None:
        """Run it."""
        with failing_as("The model cannot be run"), torch.no_grad():
            forward()

    return run


def _training(model: "nn.Module", forward: Callable[[], object]) -> Callable[[], None]:
    """Return a forward and backward pass, with ones for the gradients of all that the model returns."""
    import torch
    from torch.utils._pytree import tree_leaves

    def run() -> None:
        """Run it."""
        model.zero_grad()
        with failing_as("The model cannot be run"):
            results = [
                each for each in tree_leaves(forward()) if torch.is_tensor(each) and each.requires_grad
            ]
            if not results:
                raise ValueError("it returns nothing that has a gradient, and the plan is for training")
            torch.autograd.backward(results, [torch.ones_like(each) for each in results])

    return run
