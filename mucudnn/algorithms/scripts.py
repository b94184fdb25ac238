"""Functions that run in TorchScript's interpreter where there is one, and in Python's where there is not.

A block of a tiled convolution is a dozen operations of 5 to 100 microseconds. Python's interpreter takes
its lock between any two of them, so that two threads that each run such a sequence wait for one another;
TorchScript's holds no lock. (Blocks of 28 tiles and 64 channels on two threads: 1.5 times as fast.)
TorchScript is deprecated, not removed: what is passed here is ordinary Python and computes the same alone.
"""

import functools
import re
import threading
import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

from mucudnn.interruptions import interruption_of, pass_on_interruption
from mucudnn.locks import ForkSafeLock

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_compiling = ForkSafeLock()

_ENDED = re.compile(r"\bSystemExit(?:: (\d+)$)?", re.MULTILINE)
"""What an error of TorchScript's says where Python's was to end the program, with a status."""


class Script(Generic[Parameters, Result]):
    """A function that is compiled by TorchScript when it is first called; if it cannot be, it runs as it is.

    Args:
        function: of tensors, numbers, lists and named tuples of them, with annotations, and of operations
            that TorchScript knows; what it calls must be of the same kind, or `called_from_scripts`.
    """

    def __init__(self, function: Callable[Parameters, Result]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._compiled: Callable[Parameters, Result] | None = None
        _scripts.append(self.compile)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Call the function.

        Raises:
            KeyboardInterrupt, SystemExit: a function of Python's that it calls has raised that, or a handler
                of a signal meanwhile; TorchScript makes a RuntimeError of it, as of all that these raise.
        """
        compiled = self._compiled or self.compile()
        _interrupted.by = None
        try:
            return compiled(*args, **kwargs)
        except RuntimeError as error:
            by, _interrupted.by = _interrupted.by, None
            if by is not None:
                raise by from error
            text = str(error)
            if "KeyboardInterrupt" in text:
                raise KeyboardInterrupt from error
            if (ended := _ENDED.search(text)) is not None:
                raise SystemExit(int(ended[1]) if ended[1] else None) from error
            raise

    def compile(self) -> Callable[Parameters, Result]:
        """Return what a call runs: a torch.jit.ScriptFunction, or the function itself."""
        with _compiling:
            if self._compiled is None:
                self._compiled = _compile(self._function)
            return self._compiled


_interrupted = threading.local()
"""By what a function of Python's was interrupted in a script, in this thread."""

_scripts: list[Callable[[], object]] = []


def called_from_scripts(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Mark a function of Python's that scripts call as it is, for 3 microseconds and with the GIL."""

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Call it, and keep what interrupts it, of which TorchScript keeps the text alone."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _interrupted.by = interruption_of(error)
            raise

    marked: Callable[Parameters, Result] = torch.jit.ignore(called)
    return marked


def compile_all() -> list[object]:
    """Compile all scripts that have been imported, so that no call does; return what their calls run."""
    return [compile_one() for compile_one in _scripts]


def interpreter() -> str:
    """Return who runs scripts in this process: "TorchScript", or "Python" if it is missing or turned off."""
    is_there = any(isinstance(each, torch.jit.ScriptFunction) for each in compile_all())
    return "TorchScript" if is_there else "Python"


def _compile(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its deprecation, and of what it does without
        try:
            made: Callable[Parameters, Result] = torch.jit.script(function)
        except Exception as error:  # noqa: BLE001  # whatever it is, but an interruption
            pass_on_interruption(error)
            return function  # whatever it cannot compile, and wherever it is no more
    return made
