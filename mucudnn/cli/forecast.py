"""`mucudnn forecast`: workspaces of a model on a GPU that need not be there."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mucudnn.choices import Policy, choice
from mucudnn.cli.cudnn import described_device, version_of
from mucudnn.cli.model import Shapes, autocasting, load_model, prepare, refuse_lazy, shapeless_inputs
from mucudnn.cli.options import (
    Target,
    autocast_option,
    channels_last_option,
    check_types,
    dtype_option,
    inputs_option,
    json_option,
    plot_option,
    policy_option,
    size,
    target_argument,
)
from mucudnn.cli.output import columns, others_on_standard_error, print_json, say
from mucudnn.forecast import Occurrence, forecast
from mucudnn.progress import progress_for
from mucudnn.report import DEFAULT_WIDTH, draw_forecast, forecast_as_json, render_forecast

if TYPE_CHECKING:
    from mucudnn.backends.cudnn.configurations import Rules


@click.command("forecast", short_help="Ask cuDNN which workspaces it wants, without a GPU.")
@target_argument
@inputs_option
@click.option(
    "--device", default="h200", show_default=True, metavar="NAME|FILE",
    help="The GPU: a name (mucudnn info lists them) or a JSON file that mucudnn info --export-device wrote.",
)  # fmt: skip
@dtype_option
@autocast_option
@channels_last_option
@click.option(
    "--workspace-limit", "--limit", "limit_bytes", type=size, metavar="SIZE",
    help="A limit for each convolution, with its unit: 256MiB, 1.5GiB; the table then says what fits.",
)  # fmt: skip
@policy_option
@click.option("--eval", "is_eval", is_flag=True, help="Inference: the forward pass alone.")
@click.option("--no-tf32", is_flag=True, help="Leave out plans that round float32 to TF32.")
@click.option("--deterministic", is_flag=True, help="Leave out plans whose results may change between runs.")
@click.option("--sites", "names_sites", is_flag=True, help="Name every place where a convolution occurs.")
@plot_option
@json_option
def forecast_command(
    target: Target,
    shapes: Shapes,
    device: str,
    dtype: str | None,
    autocast: str | None,
    channels_last: bool,
    limit_bytes: int | None,
    policy: str,
    is_eval: bool,
    no_tf32: bool,
    deterministic: bool,
    names_sites: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Tell what workspace cuDNN's plans would take for every convolution of a model, without a GPU.

    Convolutions of every kind are found, functional and transposed ones too, with the gradients that
    training needs. cuDNN itself is asked, undivided and at each micro-batch size; nothing is run, and nothing
    is said of times. It needs a CUDA build of torch, or pip install nvidia-cudnn-cu13 nvidia-cublas.

    \b
    Example:
      mucudnn forecast torchvision.models:resnet50 --input 256x3x224x224 --dtype bf16 --device h200
    """
    check_types(dtype, autocast)
    from mucudnn.backends.cudnn.configurations import Rules
    from mucudnn.backends.cudnn.devices import device_described  # here, not to wait for torch
    from mucudnn.backends.cudnn.engines import Enumerator
    from mucudnn.backends.cudnn.library import load_library

    described = device_described(device)
    library = load_library()
    occurrences = _occurrences(target, shapes, is_eval, dtype, autocast, channels_last)
    rules = Rules(allow_tf32=not no_tf32, deterministic=deterministic)
    with progress_for(None) as shown:
        made = forecast(
            occurrences,
            Enumerator(library, described, rules),
            device=f"{described_device(described)} (described by {device})",
            library=f"cuDNN {version_of(library)}",
            settings=_settings(rules, is_eval, autocast),
            policy=choice(Policy, policy),
            progress=shown,
        )
    if plot is not None:
        draw_forecast(made, plot, limit_bytes)  # before anything is printed: whoever reads that may leave
    if as_json:
        print_json(forecast_as_json(made, limit_bytes))
    else:
        width = columns(DEFAULT_WIDTH)
        click.echo(render_forecast(made, limit_bytes, width=width, names_sites=names_sites))
    if plot is not None:
        say(f"It is drawn in {plot}.", as_json)


def _occurrences(
    target: Target,
    shapes: Shapes,
    is_eval: bool,
    dtype: str | None,
    autocast: str | None,
    channels_last: bool,
) -> tuple[Occurrence, ...]:
    """Return what the user's model computes; whatever it prints goes to standard error."""
    from mucudnn.examining.tracing import trace

    with others_on_standard_error():
        model = load_model(target)
        refuse_lazy(model, target)
        prepare(model, is_eval=is_eval, dtype=dtype, channels_last=channels_last)
        with autocasting(model, autocast):
            return trace(model, shapeless_inputs(model, shapes, channels_last=channels_last))


def _settings(rules: "Rules", is_eval: bool, autocast: str | None) -> tuple[str, ...]:
    return (
        "forward pass alone" if is_eval else "forward pass and gradients",
        *([] if autocast is None else [f"autocast to {autocast}"]),
        f"TF32 {'allowed' if rules.allow_tf32 else 'not allowed'}",
        f"nondeterministic plans {'not allowed' if rules.deterministic else 'allowed'}",
    )
