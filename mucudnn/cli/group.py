"""The program `mucudnn`: how it begins and how it ends."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import click

from mucudnn.cli.output import Failure, Mistake, sentence, warnings_as_lines
from mucudnn.errors import MucudnnError, OptionError
from mucudnn.version import __version__

_INTERRUPTED = 130
"""Exit status of a program that Control-C has ended: 128 + SIGINT."""


def _with_hyphens(token: str) -> str:
    """Return the name of an option or of a choice as it is listed: power_of_two is Python's spelling."""
    return token.replace("_", "-")


class _Commands(click.Group):
    """Commands whose failures are sentences, listed in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return the names of the commands as they were added."""
        return list(self.commands)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the arguments; the help and the version are printed here."""
        with _failing_in_sentences():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what ends it early is told in a sentence, and by its status.

        1 is for what cannot be done, 2, as click's own, for what cannot be meant, 130 for an interrupt.
        """
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that knows no "×" shows a question mark
        try:
            with _failing_in_sentences(), warnings_as_lines():
                return super().invoke(ctx)
        except SystemExit as error:  # of the user's model, say: ours is another one
            raise Failure(f"The model has tried to end the program, by {error!r}.") from error
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


@contextlib.contextmanager
def _failing_in_sentences() -> Iterator[None]:
    """Turn our errors, and those of files, into what click prints as one line."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever reads our output has seen enough; click ends quietly
    except OptionError as error:
        raise Mistake(sentence(error)) from error
    except (MucudnnError, OSError) as error:
        raise Failure(sentence(error)) from error


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _with_hyphens},
)
@click.version_option(__version__, prog_name="mucudnn", message="%(prog)s %(version)s")
def main() -> None:
    """Make the convolutions of a PyTorch model faster within a limit of their scratch memory (workspace).

    \b
    Example:
      mucudnn tune models:make_resnet --input 64x3x32x32 --workspace-limit 16MiB -o plan.json
    and then, in the program that runs the model:
      mucudnn.apply(model, mucudnn.Plan.load("plan.json"))
    """
