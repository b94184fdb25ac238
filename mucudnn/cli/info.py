"""`mucudnn info`: what there is here, and what a time depends on."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from mucudnn.cli.cudnn import version_of
from mucudnn.cli.options import FILE, json_option
from mucudnn.cli.output import print_json, report_width
from mucudnn.errors import BackendError, StoreError
from mucudnn.files import is_there, write_whole
from mucudnn.interruptions import pass_on_interruption
from mucudnn.intervals import Estimate
from mucudnn.profile import Environment
from mucudnn.profiling.replay import numbered
from mucudnn.recordings import shipped
from mucudnn.report import describe_environment, describe_facts, render_notes
from mucudnn.report.plan_advice import waits_by_default
from mucudnn.store import default_path, expanded, readable_store
from mucudnn.store.connections import errors_naming
from mucudnn.version import __version__

_STANDARD_OUTPUT = "-"

_TEAM = "Worker threads are OpenMP's own: after an operation they take {} times as long as after a rest."
_POOL = "After an operation OpenMP's idle threads spin: worker threads take {} times as long meanwhile."
_ADVICE = (
    " With GOMP_SPINCOUNT=10000 in the environment before the start idle threads sleep sooner; mucudnn never "
    "sets it."
)
_COSTLY = 1.05
"""A ratio that is worth a setting which also makes the next operation wait for threads that sleep."""


@click.command("info", short_help="Show this machine, its store and recordings.")
@click.option(
    "--export-device", "exported", is_flag=False, flag_value=_STANDARD_OUTPUT, metavar="[FILE]",
    help="Write the description of this machine's GPU, for mucudnn forecast --device FILE, and nothing else; "
    "without FILE, to standard output.",
)  # fmt: skip
@click.option(
    "--store",
    type=FILE,
    help="The store to describe.  [default: MUCUDNN_STORE, else one in the user's cache]",
)
@json_option
def info_command(exported: str | None, store: Path | None, as_json: bool) -> None:
    """Show what times measured here depend on, where they are stored, and which cuDNN was found.

    Where PyTorch computes with several threads, it also measures by how much an ordinary operation slows
    the worker threads that run right after it.
    Several environments of a store are numbered, as mucudnn tune --backend replay:FILE#2 numbers them.

    \b
    Example:
      MUCUDNN_STORE=profiles.sqlite3 mucudnn info
      mucudnn info --store profiles.sqlite3
      mucudnn info --export-device my_gpu.json
    """
    if exported is not None:
        _check_idle(store=store is not None, json=as_json)
        _export_device(exported)
        return
    here = _Here.seen(expanded(store or default_path()))
    if as_json:
        print_json(here.as_json())
    else:
        click.echo("\n".join(render_notes(here.notes(), report_width())))
    if here.kept.failure is not None:
        raise here.kept.failure


def _check_idle(**given: bool) -> None:
    """Refuse options for which a description that is written has no use."""
    for option in (option for option, is_given in given.items() if is_given):
        raise click.BadParameter(
            "--export-device writes nothing else; leave this out.", param_hint=f"'--{option}'"
        )


class _Here(NamedTuple):
    """What is shown: this machine, its current card if it has one, the store at a path, and the library."""

    environment: Environment
    card: "_Card | None"
    path: Path
    kept: "_Kept"
    compiled: Path
    cudnn: "_Cudnn"
    spinning: Estimate | None
    devices: tuple[str, ...]

    @classmethod
    def seen(cls, path: Path) -> "_Here":
        """Return what there is now."""
        import torch

        from mucudnn.algorithms.compiled.compiler import compiled_folder
        from mucudnn.backends import backend_for
        from mucudnn.backends.cudnn.devices import DEVICES

        environment = backend_for("auto", torch.device("cpu")).environment()
        card, cudnn = _Card.here(), _Cudnn.here()
        spinning, devices = _spinning_cost(), tuple(DEVICES)
        return cls(environment, card, path, _Kept.of(path), compiled_folder(), cudnn, spinning, devices)

    def as_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "report": "info",
            "version": __version__,
            "environment": self.environment.to_json(),
            "card": None if self.card is None else self.card.as_json(),
            "store": {
                "path": str(self.path),
                "records": self.kept.records,
                "environments": [each.to_json() for each in self.kept.environments],
            },
            "compiled_code": str(self.compiled),
            "cudnn": self.cudnn._asdict(),
            "spinning": None if self.spinning is None else dataclasses.asdict(self.spinning),
            "devices": list(self.devices),
            "recordings": list(shipped()),
        }

    def notes(self) -> list[tuple[str, str]]:
        """Return it as labels and texts."""
        spinning, cudnn = self.spinning, self.cudnn
        return [
            ("mucudnn", __version__),
            *_described(self.environment),
            *([] if self.card is None else self.card.notes()),
            *([] if spinning is None else [("idle threads", describe_spinning(spinning, self.environment))]),
            ("store", f"{self.path}, {self.kept}"),
            *(("", each) for each in self.kept.numbered),
            ("compiled code", f"{self.compiled} (which may be deleted)"),
            ("cuDNN", cudnn.problem or f"{cudnn.version}, {cudnn.path}"),
            ("recordings", f"{', '.join(shipped())} (for mucudnn tune --backend replay:NAME)"),
            ("described GPUs", f"{', '.join(self.devices)} (for mucudnn forecast --device)"),
        ]


def _described(environment: Environment) -> list[tuple[str, str]]:
    """Return what times there depend on, and what else is known, as labels and texts."""
    return [*describe_environment(environment).items(), ("system", describe_facts(environment.soft))]


def _spinning_cost() -> Estimate | None:
    """Return how many times as long worker threads take after an operation; None where no thread is idle."""
    import torch

    from mucudnn.backends.cpu.spinning import spinning_cost

    return spinning_cost() if torch.get_num_threads() > 1 else None


def describe_spinning(cost: Estimate, environment: Environment) -> str:
    """Return what was measured of worker threads after an operation, and what would help if it costs time.

    Args:
        cost: how many times as long they take as after a rest.
        environment: in which that was measured.
    """
    told = _TEAM if environment.policy.get("workers") == "team" else _POOL
    advice = _ADVICE if cost.low > _COSTLY and waits_by_default(environment) else ""
    return told.format(f"{cost.median:.2f} [{cost.low:.2f}, {cost.high:.2f}]") + advice


class _Card(NamedTuple):
    """What times on the current card depend on, or why it cannot be used."""

    environment: Environment | None = None
    problem: str = ""

    @classmethod
    def here(cls) -> "_Card | None":
        """Return what it is now; None where there is no card."""
        import torch

        from mucudnn.backends import backend_of

        if not torch.cuda.is_available():
            return None
        try:
            return cls(backend_of("cudnn:").environment())
        except RuntimeError as error:  # as where another process has it for itself
            pass_on_interruption(error)
            return cls(problem=f"It cannot be used: {error}".splitlines()[0])

    def as_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {"problem": self.problem} if self.environment is None else self.environment.to_json()

    def notes(self) -> list[tuple[str, str]]:
        """Return it as labels and texts."""
        return [("card", self.problem)] if self.environment is None else _described(self.environment)


class _Cudnn(NamedTuple):
    """The library that would be used here, or why there is none."""

    version: str | None = None
    path: str | None = None
    problem: str | None = None

    @classmethod
    def here(cls) -> "_Cudnn":
        """Return what loading the library gives: version and path, or the sentence that says why not."""
        from mucudnn.backends.cudnn.library import load_library

        try:
            library = load_library()
        except BackendError as error:
            return cls(problem=str(error))
        return cls(version_of(library), library.path)


class _Kept(NamedTuple):
    """What a store holds, or why it cannot be read."""

    exists: bool = True
    records: int | None = 0
    environments: Sequence[Environment] = ()
    failure: StoreError | None = None

    @classmethod
    def of(cls, path: Path) -> "_Kept":
        """Return what the file holds; it is only read, unless a write that a crash tore is to be undone."""
        try:
            with errors_naming(path):
                if not is_there(path):
                    return cls(exists=False)
                if path.is_file() and path.stat().st_size == 0:
                    return cls()
            with readable_store(path) as store:
                return cls(records=store.count(), environments=store.environments())
        except StoreError as error:
            return cls(records=None, failure=error)

    @property
    def numbered(self) -> list[str]:
        """The environments, numbered as a replay does, if there are several."""
        return numbered(self.environments) if len(self.environments) > 1 else []

    def __str__(self) -> str:
        if self.records is None:
            return "which cannot be read"
        if not self.exists:
            return "which does not exist yet"
        several = f" of {len(self.environments)} environments" if len(self.environments) > 1 else ""
        return f"{self.records} records{several}"


def _export_device(file: str) -> None:
    """Write what cuDNN says of the first GPU that this process sees.

    Raises:
        BackendError: there is no cuDNN, or it finds no GPU.
    """
    from mucudnn.backends.cudnn.devices import live_device
    from mucudnn.backends.cudnn.library import CudnnError, load_library

    library = load_library()
    try:
        text = live_device(library, 0).text
    except CudnnError as error:
        raise BackendError(f"There must be a GPU to export, but cuDNN finds none: {error}") from error
    if file == _STANDARD_OUTPUT:
        click.echo(text)
    else:
        write_whole(file, f"{text}\n".encode())
