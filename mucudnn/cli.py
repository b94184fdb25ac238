"""The command line: parses, calls, prints. What computes is loaded by the command that needs it."""

import contextlib
import importlib
import io
import json
import sys
import time
import warnings
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from mucudnn.errors import MucudnnError, SizeError, StoreError
from mucudnn.plan import Mode, Plan, Policy
from mucudnn.report import describe_environment, describe_facts, plan_as_json, render_notes, render_plan
from mucudnn.sizes import parse_bytes
from mucudnn.store import MemoryStore, Store, StoreWarning, default_path, open_store
from mucudnn.version import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn

_INTERRUPTED = 130
"""Exit status of a program that Control-C has ended: 128 + SIGINT."""

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Failure(click.ClickException):
    """What cannot be done, in a sentence; it ends the program with status 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the sentence as all our messages are printed."""
        _tell(self.format_message(), file)


class _Target(NamedTuple):
    """What makes the user's model."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def _target(text: str) -> _Target:
    module, _, name = text.partition(":")
    if not all(word.isidentifier() for word in (*module.split("."), *name.split("."))):
        raise click.BadParameter(f"it must read PACKAGE.MODULE:CALLABLE, but got {text!r}.")
    return _Target(module, name)


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise click.BadParameter(f"it must read like 64x3x32x32, but got {text!r}.")
    return tuple(int(size) for size in sizes)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except SizeError as error:
        raise click.BadParameter(str(error)) from error


class _Commands(click.Group):
    """Commands whose failures are sentences."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what it cannot do ends it with a sentence and status 1, an interrupt with 130."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that knows no "×" shows a question mark
        try:
            with _warnings_as_lines():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever reads our output has seen enough; click ends quietly
        except (MucudnnError, OSError) as error:
            raise _Failure(_sentence(error)) from error
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


_FILE = click.Path(dir_okay=False, path_type=Path)
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead: seconds and bytes.")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mucudnn", message="%(prog)s %(version)s")
def main() -> None:
    """Make the convolutions of a PyTorch model as fast as they can be within a workspace limit.

    \b
    Example:
      mucudnn tune models:make_resnet --input 64x3x32x32 --workspace-limit 16MiB -o plan.json
    and then, in the program that runs the model:
      mucudnn.apply(model, mucudnn.Plan.load("plan.json"))
    """


@main.command("tune")
@click.argument("target", type=_target, metavar="PACKAGE.MODULE:CALLABLE")
@click.option(
    "--input", "shapes", type=_shape, multiple=True, required=True, metavar="SHAPE",
    help="Shape of an input, such as 64x3x32x32; once for each positional argument of the model.",
)  # fmt: skip
@click.option(
    "--workspace-limit", "limit_bytes", type=_size, required=True, metavar="SIZE",
    help="Most workspace, with its unit: 16MiB, 1.5GiB, 512KB.",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice([str(mode) for mode in Mode]), default=str(Mode.REUSE), show_default=True,
    help="Whose the limit is: each convolution's, which take turns in one buffer, or that of all together.",
)  # fmt: skip
@click.option(
    "--policy", type=click.Choice([str(policy).replace("_", "-") for policy in Policy]),
    default="power-of-two", show_default=True, help="Which micro-batch sizes are tried.",
)  # fmt: skip
@click.option("--eval", "is_eval", is_flag=True, help="Tune for inference: the forward pass alone.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Type of model and inputs.  [default: the model's]")
@click.option("--channels-last", is_flag=True, help="Lay out the model and its 4-D inputs channels-last.")
@click.option(
    "--backend", type=click.Choice(["auto", "cpu"]), default="auto", show_default=True,
    help="What computes; auto is what the model's device asks for.",
)  # fmt: skip
@click.option("--store", type=_FILE, help="Where profiles are kept.  [default: as mucudnn info says]")
@click.option("-o", "--output", type=_FILE, help="Where to save the plan; without it, it is only shown.")
@_AS_JSON
def tune_command(
    target: _Target,
    shapes: tuple[tuple[int, ...], ...],
    limit_bytes: int,
    mode: str,
    policy: str,
    is_eval: bool,
    dtype: str | None,
    channels_last: bool,
    backend: str,
    store: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure, choose a division for every convolution of a model, and save the plan.

    CALLABLE is called without arguments and returns the model (a model itself will do, too). It is found as
    Python finds modules, the current directory first. The model is tuned in training mode, on inputs of
    random values.

    \b
    Example:
      mucudnn tune torchvision.models:resnet18 --input 32x3x224x224 --workspace-limit 64MiB -o plan.json
    """
    if output is not None and not output.absolute().parent.is_dir():
        raise click.BadParameter(
            f"its folder must exist, but got '{output}'.", param_hint="'-o' / '--output'"
        )
    from mucudnn.tuner import tune  # here, so that help and the other commands do not wait for torch

    start = time.perf_counter()
    to_stderr = contextlib.redirect_stdout(sys.stderr)  # whatever the model prints, stdout has the plan alone
    with open_store(store) as opened, _telling_what_is_kept(opened), to_stderr:
        model = _load_model(target)
        _prepare(model, is_eval, dtype, channels_last)
        sample = _sample(model, shapes, channels_last)
        plan = tune(model, sample, limit_bytes, mode=mode, policy=policy, backend=backend, store=opened)
    _print_plan(plan, as_json)
    _say(f"Tuned in {time.perf_counter() - start:.1f} s.", as_json)
    if output is None:
        _say("The plan is not saved; -o FILE saves it.", as_json)
    else:
        plan.save(output)
        _say(f"The plan is saved in {output}.", as_json)


@main.command("show")
@click.argument("path", type=click.Path(path_type=Path), metavar="PLAN")
@_AS_JSON
def show_command(path: Path, as_json: bool) -> None:
    """Show a saved plan: what ran before, what runs now, and what that gains.

    \b
    Example:
      mucudnn show plan.json
    """
    _print_plan(Plan.load(path), as_json)


@main.command("info")
@_AS_JSON
def info_command(as_json: bool) -> None:
    """Show what a time measured here and now depends on, and where profiles are kept.

    \b
    Example:
      MUCUDNN_STORE=profiles.sqlite3 mucudnn info
    """
    import torch

    from mucudnn.backends import backend_for

    environment = backend_for("auto", torch.device("cpu")).environment()
    path = default_path()
    records, failure = _records_in(path)
    if as_json:
        store = {"path": str(path), "records": records}
        _print_json({"version": __version__, "environment": environment.to_json(), "store": store})
    else:
        described = "which cannot be read" if records is None else f"{records} records"
        notes = [
            ("mucudnn", __version__),
            *describe_environment(environment).items(),
            ("system", describe_facts(environment.soft)),
            ("store", f"{path}, {described}"),
        ]
        click.echo("\n".join(render_notes(notes)))
    if failure is not None:
        raise failure


def _records_in(path: Path) -> tuple[int | None, StoreError | None]:
    """Return how many records a store has, or None and why; a file that does not exist is not made."""
    if not path.exists():
        return 0, None
    try:
        with open_store(path) as store:
            return store.count(), None
    except StoreError as error:
        return None, error


def _load_model(target: _Target) -> "nn.Module":
    """Return the model that the user's module holds or makes.

    Raises:
        _Failure: there is none; the message says what went wrong.
    """
    from torch import nn

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with _failing_as(f"{target.module} cannot be imported"):
        module = importlib.import_module(target.module)
    with _failing_as(f"{target} cannot be found"):
        made = attrgetter(target.name)(module)
    if callable(made) and not isinstance(made, nn.Module):
        with _failing_as(f"{target} fails"):
            made = made()
    if not isinstance(made, nn.Module):
        got = type(made).__name__
        raise _Failure(f"{target} must give a torch.nn.Module, but got a value of type {got}.")
    return made


@contextlib.contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one sentence that begins with `what`."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a module may try to end the program
        raise _Failure(f"{what}: {_reason(error)}.") from error


def _prepare(model: "nn.Module", is_eval: bool, dtype: str | None, channels_last: bool) -> None:
    """Bring the model into the mode, type and layout in which it is to be tuned."""
    import torch

    model.train(not is_eval)
    if dtype is not None:
        model.to(dtype=getattr(torch, dtype))
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's hints


def _sample(
    model: "nn.Module", shapes: tuple[tuple[int, ...], ...], channels_last: bool
) -> "tuple[Tensor, ...]":
    """Return random inputs of the given shapes, of the model's type and on its device."""
    import torch

    pattern = next((each for each in model.parameters() if each.dtype.is_floating_point), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(pattern) for shape in shapes]
    if not channels_last:
        return tuple(inputs)
    return tuple(
        each.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else each for each in inputs
    )


@contextlib.contextmanager
def _telling_what_is_kept(store: Store) -> Iterator[None]:
    """On an interrupt, say what remains of the work, and let it pass."""
    try:
        yield
    except KeyboardInterrupt:
        if not isinstance(store, MemoryStore):
            _tell("interrupted; what was measured is kept in the store.")
        raise


def _print_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        _print_json(plan_as_json(plan))
    else:
        click.echo(render_plan(plan))


def _print_json(value: dict[str, object]) -> None:
    click.echo(json.dumps(value, indent=1, allow_nan=False))


def _say(line: str, as_json: bool) -> None:
    """Print a line to standard output or, where that is JSON, to standard error."""
    click.echo(line, err=as_json)


def _tell(message: str, file: IO[Any] | None = None) -> None:
    """Print a warning or an error, to standard error unless there is a file."""
    click.echo(f"mucudnn: {message}", file=file, err=True)


def _sentence(error: Exception) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'A file'} cannot be used: {error.strerror}."
    return _in_one_line(str(error))


def _reason(error: BaseException) -> str:
    """Return what an error of the user's code says, in one line that goes on with a full stop."""
    text = _in_one_line(str(error)).removesuffix(".")
    if text and not isinstance(error, KeyError):
        return text
    return f"{type(error).__name__} {text}".rstrip()  # which alone says nothing, or just names the key


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Show warnings of the store as one line on standard error; others as Python shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", StoreWarning)
        show_as_before = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, StoreWarning):
                _tell(_in_one_line(str(message)))
            else:
                show_as_before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
