"""The C compiler of this machine, and what it has compiled, which is kept in the user's cache folder."""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import platformdirs

from mucudnn.errors import BackendError

_OPTIONS = ("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC")
"""None lets sums be reordered, NaN be left out, or the processor's flags be changed."""

_NATIVE = (("-march=native",), ("-mcpu=native",), ())
"""How compilers are told to use all that this processor has; the first that one knows."""

_VECTOR_BYTES = (("__AVX512F__", 64), ("__AVX__", 32))
"""By what a compiler says of the processor; 16 elsewhere."""

_TIMEOUT_S = 120

_TRIAL = "#include <stdint.h>\n#include <string.h>\nint64_t trial(void) { return 0; }\n"


class Compiler(NamedTuple):
    """A compiler of C.

    Attributes:
        command: and options, with which it compiles for this processor.
        name: such as "gcc 12.2.0".
        vector_bytes: of this processor's registers.
        identity: tells apart what compilers make for processors that differ.
    """

    command: tuple[str, ...]
    name: str
    vector_bytes: int
    identity: str


@functools.cache
def compiler() -> Compiler | None:
    """Return the compiler that the variable CC names, or else cc, gcc or clang; None if there is none.

    It is asked once a process, in some tenths of a second, and has to make a library that can be loaded.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # a quotation without an end
        return None
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(words[0]) is None:
            continue
        for native in _NATIVE:
            found = _asked((*words, *native))
            if found is not None and _is_able(found):
                return found
    return None


def needed_compiler() -> Compiler:
    """Return the compiler.

    Raises:
        BackendError: there is none.
    """
    found = compiler()
    if found is None:
        raise BackendError("There is no C compiler: neither cc, gcc, clang nor what the variable CC names.")
    return found


def description() -> str:
    """Return the compiler's name, on which times and roundings depend; "none" if there is none."""
    found = compiler()
    return "none" if found is None else found.name


def library(source: str) -> ctypes.CDLL:
    """Return the library of that source: from the cache folder, or compiled in some seconds.

    Raises:
        BackendError: there is no compiler, or it cannot compile it; it is not asked again.
    """
    found = _known(source)
    if isinstance(found, BackendError):
        raise found
    return found


@functools.cache
def _known(source: str) -> ctypes.CDLL | BackendError:
    try:
        return _loaded(source)
    except BackendError as error:
        return error
    except OSError as error:
        return BackendError(f"A compiled convolution could not be kept or loaded: {error}")


def _loaded(source: str) -> ctypes.CDLL:
    found = needed_compiler()
    key = hashlib.sha256("\0".join([source, found.identity, *found.command]).encode()).hexdigest()
    place = platformdirs.user_cache_path("mucudnn", appauthor=False) / "compiled" / f"{key[:32]}.so"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(place))
    with tempfile.TemporaryDirectory(prefix="mucudnn-") as folder:
        made = Path(folder, "library.so")
        _compile(found, source, made)
        with contextlib.suppress(OSError):  # a folder that cannot be written costs the next process its time
            _keep(made, place)
            return ctypes.CDLL(str(place))
        return ctypes.CDLL(str(made))


def _asked(command: tuple[str, ...]) -> Compiler | None:
    """Return what a compiler says of itself and of this processor; None if it does not answer."""
    try:
        said = subprocess.run(
            [*command, "-dM", "-E", "-x", "c", "-"],
            input="",
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    kind = "clang" if "__clang__" in said else "gcc"
    version = re.search(r'__VERSION__ "(?:\D* )?([\d.]+)', said)
    vector_bytes = next((n for macro, n in _VECTOR_BYTES if f"#define {macro} " in said), 16)
    name = f"{kind} {version[1] if version else 'of an unknown version'}"
    return Compiler((*command, *_OPTIONS), name, vector_bytes, hashlib.sha256(said.encode()).hexdigest())


def _is_able(found: Compiler) -> bool:
    """Return whether a compiler has what it takes beside itself: headers, a linker, flags that agree."""
    try:
        with tempfile.TemporaryDirectory(prefix="mucudnn-") as folder:
            made = Path(folder, "trial.so")
            _compile(found, _TRIAL, made)
            ctypes.CDLL(str(made))
    except (BackendError, OSError):
        return False
    return True


def _compile(by: Compiler, source: str, place: Path) -> None:
    try:
        subprocess.run(
            [*by.command, "-o", str(place), "-x", "c", "-"],
            input=source,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        first = next(iter(str(error.stderr).splitlines()), f"it ended with {error.returncode}")
        raise BackendError(f"{by.name} could not compile a convolution: {first}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"{by.name} could not compile a convolution: {error}") from error


def _keep(made: Path, place: Path) -> None:
    """Copy a library to its place, whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=place.parent, suffix=".part", delete=False) as part:
        try:
            part.write(made.read_bytes())
            part.flush()
            Path(part.name).replace(place)
        except OSError:
            Path(part.name).unlink(missing_ok=True)
            raise
