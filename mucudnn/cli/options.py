"""Arguments and options that commands share, and how they are read."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import click

from mucudnn.choices import Policy
from mucudnn.errors import OptionError, SizeError
from mucudnn.files import is_device
from mucudnn.report import checked_kind
from mucudnn.sizes import parse_bytes

DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "float16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
    "float64": "float64",
}
"""torch's names of types by the names that people give them."""

_HALVES = {name: kind for name, kind in DTYPES.items() if kind in ("bfloat16", "float16")}
"""Those of 16 bits."""

_INTEGERS = {"int32": "int32", "int": "int32", "int64": "int64", "long": "int64", "bool": "bool"}
"""The same of what is counted, for inputs alone."""


class FiniteRange(click.FloatRange):
    """A number that is one, and has an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number that an option names."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"it must be finite, but got {value}.", param, ctx)
        return number


class _NamedPath(click.Path):
    """A path that is one: "" is what a variable of the shell leaves that is not set."""

    def __init__(self, **allowed: bool) -> None:
        super().__init__(**allowed, path_type=Path)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the path that an option names."""
        if not os.fspath(value):
            self.fail("it must name a file, but got ''.", param, ctx)
        return super().convert(value, param, ctx)  # type: ignore[return-value]  # as path_type says


PLAN = _NamedPath(readable=False)
"""A plan that there is; if it cannot be read, whatever the reason, its loading says so."""

FILE = _NamedPath(dir_okay=False)


class NewFile(_NamedPath):
    """A file that is written after hours of work, perhaps: what could not be is refused before."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, readable=False, writable=True)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the path that an option names."""
        path = super().convert(value, param, ctx)
        if str(path) == "-":
            self.fail("it must be a file: nothing is written to standard output by '-'.", param, ctx)
        folder = Path(os.path.realpath(path)).parent
        if not is_device(path) and not (folder.is_dir() and os.access(folder, os.W_OK)):
            self.fail(f"its folder must exist and be writable, but got '{path}'.", param, ctx)
        return path


class _PictureFile(NewFile):
    """A file that something is drawn into."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the path that an option names."""
        path = super().convert(value, param, ctx)
        try:
            checked_kind(path)
        except OptionError as error:
            self.fail(str(error), param, ctx)
        return path


class Target(NamedTuple):
    """What makes the user's model."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def _target(text: str) -> Target:
    module, _, name = text.partition(":")
    meant = module.removesuffix(".py").removeprefix("./").replace("/", ".")
    file = Path(module)
    if file.is_absolute() and file.suffix == ".py" and file.stem.isidentifier() and name.isidentifier():
        raise click.BadParameter(
            f"it must read PACKAGE.MODULE:CALLABLE, but got {text!r}; did you mean '{file.stem}:{name}', run "
            f"in {file.parent}?"
        )
    if not all(word.isidentifier() for word in (*meant.split("."), *name.split("."))):
        raise click.BadParameter(f"it must read PACKAGE.MODULE:CALLABLE, but got {text!r}.")
    if meant != module:
        raise click.BadParameter(
            f"the module must be named as in an import, but got {text!r}; did you mean '{meant}:{name}'?"
        )
    return Target(module, name)


class Shape(NamedTuple):
    """What an input is like.

    Attributes:
        sizes: of its dimensions.
        dtype: torch's name of its type; None for the model's.
    """

    sizes: tuple[int, ...]
    dtype: str | None = None

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes)) + ("" if self.dtype is None else f":{self.dtype}")


def _shape(text: str) -> Shape:
    written, colon, name = text.lower().partition(":")
    sizes, types = written.split("x"), DTYPES | _INTEGERS
    if not all(size.isdecimal() for size in sizes) or (colon and name not in types):
        raise click.BadParameter(
            f"it must read like 64x3x32x32, or 64:int64 where the type is not the model's, but got {text!r}."
        )
    if 0 in map(int, sizes):
        raise click.BadParameter(f"all sizes must be at least 1, but got {text!r}.")
    return Shape(tuple(int(size) for size in sizes), types[name] if colon else None)


def size(text: str) -> int:
    """Return the bytes that the text of an option names.

    Raises:
        BadParameter: it names none.
    """
    try:
        return parse_bytes(text)
    except SizeError as error:
        raise click.BadParameter(str(error)) from error


def check_files(output: Path | None, plot: Path | None) -> None:
    """Refuse a picture in the place of a plan.

    Raises:
        BadParameter: both are to be one file.
    """
    if output is not None and plot is not None and output.resolve() == plot.resolve():
        raise click.BadParameter(f"the plan itself is saved in '{plot}'.", param_hint="'--plot'")


def check_types(dtype: str | None, autocast: str | None) -> None:
    """Refuse a model to be cast that autocast leaves alone, or that has 16 bits already.

    Raises:
        BadParameter: it is of another type than float32.
    """
    if autocast is not None and dtype not in (None, "float32"):
        raise click.BadParameter(
            f"autocast is for models in float32, but got --dtype {dtype}.", param_hint="'--autocast'"
        )


def _dtype(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    return None if name is None else DTYPES[name]


target_argument = click.argument("target", type=_target, metavar="PACKAGE.MODULE:CALLABLE")
inputs_option = click.option(
    "--input", "shapes", type=_shape, multiple=True, required=True, metavar="SHAPE",
    help="Shape of an input, such as 64x3x32x32, or 64:int64 with a type of its own (integers are "
    "zeros and ones at random); once for each positional argument of the model.",
)  # fmt: skip
policy_option = click.option(
    "--policy", type=click.Choice([str(policy).replace("_", "-") for policy in Policy]),
    default="power-of-two", show_default=True,
    help="Micro-batch sizes to try: the whole batch alone, powers of two as well, or every size (slow).",
)  # fmt: skip
dtype_option = click.option(
    "--dtype", type=click.Choice(list(DTYPES), case_sensitive=False), callback=_dtype, metavar="TYPE",
    help="Type that the whole model and its inputs are cast to: bf16, fp16, f32, f64 or torch's names.  "
    "[default: the model's]",
)  # fmt: skip
autocast_option = click.option(
    "--autocast", type=click.Choice(list(_HALVES), case_sensitive=False), callback=_dtype, metavar="TYPE",
    help="Run the model in torch.autocast to bf16 or fp16, as training in mixed precision does; its "
    "parameters keep their type, which --dtype would change.",
)  # fmt: skip
channels_last_option = click.option(
    "--channels-last", is_flag=True, help="Lay out the model and its 4-D and 5-D inputs channels-last."
)
plot_option = click.option(
    "--plot", type=_PictureFile(),
    help="File to draw it in: .svg, .pdf or .png, or .html for a page that has the table as well.",
)  # fmt: skip
brief_option = click.option(
    "--brief", is_flag=True, help="Leave out the legend, and how and where it was measured."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead: seconds and bytes.")
