"""What a user may ask of the tuner, read and checked before any work is done."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Collection
from numbers import Number, Real
from typing import Any

from mucudnn.backends import BACKENDS
from mucudnn.choices import PREFIX, Mode, Policy, Search, choice
from mucudnn.errors import OptionError, SizeError
from mucudnn.examining.extraction import wanted_ops
from mucudnn.interruptions import pass_on_interruption
from mucudnn.objects import described, lacking, offers
from mucudnn.profiling.measurer import Measurer
from mucudnn.profiling.profiler import Profiler
from mucudnn.progress import ProgressOption, check_progress
from mucudnn.recordings import shipped
from mucudnn.sizes import format_exactly, parse_bytes
from mucudnn.store import Store, StoreOption, default_path, expanded


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Copies and pickles leave out a `Progress`, which may hold what cannot be copied, such as a file.

    Attributes:
        limit_bytes: the workspace limit, inclusive.
        mode: whose the limit is.
        policy: which micro-batch sizes are tried.
        search: which algorithms are tried.
        max_error: of an algorithm that may be chosen; None for no other bound than the backend's.
        ops: "auto", or the ops that are wanted.
        backend: "auto", a backend's name, or a recording's with its prefix.
        store: where profiles are kept; a path is absolute, and None names the default file.
        progress: who is told.
        again: whether what the store knows is measured anew.
    """

    limit_bytes: int
    mode: Mode
    policy: Policy
    search: Search
    max_error: float | None
    ops: str | Collection[str]
    backend: str
    store: StoreOption
    progress: ProgressOption
    again: bool

    @classmethod
    def of(
        cls,
        workspace_limit: int | str,
        *,
        mode: str,
        policy: str,
        search: str,
        max_error: float | None,
        ops: str | Collection[str],
        backend: str,
        store: StoreOption,
        again: bool,
        progress: ProgressOption,
    ) -> "Settings":
        """Read and check all options.

        Raises:
            SizeError, OptionError: one of them cannot be read, or is none of the choices.
        """
        wanted_ops(ops, is_training=True)
        settings = cls(
            limit_bytes=_limit_bytes(workspace_limit),
            mode=choice(Mode, mode),
            policy=choice(Policy, policy),
            search=choice(Search, search),
            max_error=_checked_error(max_error),
            ops=ops if isinstance(ops, str) else (*ops,),  # whatever becomes of a list meanwhile
            backend=checked_backend(backend),
            store=store,
            again=again,
            progress=progress,
        )
        if not isinstance(again, bool):
            raise OptionError(f"again must be True or False, but got {again!r}.")
        if settings.again and settings.recording is not None:
            raise OptionError(
                f"again must come with a backend that measures, but got {backend!r}, a recording."
            )
        if not (store is None or isinstance(store, str | os.PathLike) or offers(store, Store)):
            absent = lacking(store, Store) if hasattr(store, "records") else []
            lacks = f", which lacks {', '.join(absent)}" if absent else ""
            raise OptionError(f"store must be a path, a Store or None, but got {described(store)}{lacks}.")
        check_progress(progress)
        return dataclasses.replace(settings, store=_settled(store))

    def __getstate__(self) -> dict[str, Any]:
        """Keep all but a `Progress`."""
        is_kept = isinstance(self.progress, bool)
        return {**self.__dict__, "progress": self.progress if is_kept else None}

    @property
    def asked(self) -> dict[str, str]:
        """The options on which a plan depends, by their names, but for `ops`, which choose the problems."""
        return {
            "workspace_limit": format_exactly(self.limit_bytes),
            "mode": str(self.mode),
            "policy": str(self.policy),
            "search": str(self.search),
            "max_error": str(self.max_error),
        }

    def profiler(self, measurer: Measurer, store: Store) -> Profiler:
        """Return what tells profiles as they are wanted here, measured by `measurer` and kept in `store`."""
        return Profiler(measurer, store, self.limit_bytes, self.policy, self.search, self.max_error)

    def refuse_recording(self, caller: str) -> None:
        """Raise if the backend is a recording.

        Args:
            caller: name of the function that measures where it is called.

        Raises:
            OptionError: it is one.
        """
        if self.recording is not None:
            raise OptionError(
                f"{caller} must measure where the model runs, but got {self.backend!r}, a recording; tune "
                "replays it, and apply takes its plan in the environment that was recorded."
            )

    @property
    def recording(self) -> str | None:
        """The recording that is to be replayed, without its prefix; None to measure."""
        return self.backend.removeprefix(PREFIX) if self.backend.startswith(PREFIX) else None


def _settled(store: StoreOption) -> StoreOption:
    """Return `store` so that it names the same file when the current folder is another one.

    None, the default, stays None, since whoever loads a pickle has a default of their own; one that is a
    relative path is settled as any other path.

    Raises:
        OptionError: it is no path of text, or a relative one where there is no current folder any more.
        StoreError: it names no file.
    """
    try:
        if store is None:
            return None if default_path().is_absolute() else default_path().absolute()
        return expanded(store).absolute() if isinstance(store, str | os.PathLike) else store
    except (OSError, TypeError) as error:
        pass_on_interruption(error)
        raise OptionError(
            f"store must be a path that leads somewhere, but got {store!r}: {error}."
        ) from error


def _limit_bytes(workspace_limit: int | str) -> int:
    """Return the bytes of a limit; what was given in its place may be the sample.

    Raises:
        SizeError: it is none.
    """
    if not isinstance(workspace_limit, Number | str):
        raise SizeError(
            "A limit must be a number of bytes or a string such as '64MiB', but got a "
            f"{type(workspace_limit).__name__}: optimize takes (model, limit, sample), tune (model, sample, "
            "limit)."
        )
    return parse_bytes(workspace_limit)


def _checked_error(error: object) -> float | None:
    if error is None:
        return None
    if isinstance(error, Real) and not isinstance(error, bool):
        with contextlib.suppress(OverflowError):  # which is as good as infinite
            if 0 <= float(error) < math.inf:
                return float(error)
    raise OptionError(f"max_error must be None or a number from 0 on, such as 2e-6, but got {error!r}.")


def checked_backend(backend: object) -> str:
    """Return `backend`, which is "auto", a backend's name, or a recording with its prefix.

    Raises:
        OptionError: it is none of them.
    """
    names = ("auto", *BACKENDS)
    if isinstance(backend, str) and (backend in names or (backend.startswith(PREFIX) and backend != PREFIX)):
        return backend
    choices = ", ".join(map(repr, names))
    meant = f"; did you mean '{PREFIX}{backend}'?" if backend in shipped() else "."
    raise OptionError(
        f"backend must be one of {choices}, '{PREFIX}NAME' or '{PREFIX}FILE', but got {backend!r}{meant}"
    )
