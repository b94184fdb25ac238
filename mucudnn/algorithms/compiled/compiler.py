"""The C compiler of this machine, and what it has compiled, which is kept in the user's cache folder."""

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mucudnn.errors import BackendError, BackendWarning, CompilationError, warn_user
from mucudnn.files import cache_folder
from mucudnn.interruptions import pass_on_interruption
from mucudnn.locks import ForkSafeLock, unforked_lock

_OPTIONS = (
    "-O2", "-std=gnu11", "-fno-fast-math", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-shared",
    "-fPIC",
)  # fmt: skip
"""None lets sums be reordered, or NaN be left out, whatever the variable CC says.

With -O3 gcc 12 takes about twice as long to compile, for convolutions that run 1.00 times as fast: the loops
are written for vectors, and unrolled, as they stand.
"""

_NATIVE = (("-march=native",), ("-mcpu=native",), ())
"""How compilers are told to use all that this processor has; the first that one knows."""

WIDE_BYTES = 64
"""Of vectors of which there are 32 registers; of shorter ones there may be 16."""

_VECTOR_BYTES = (("__AVX512F__", WIDE_BYTES), ("__AVX__", 32))
"""By what a compiler says of the processor; 16 elsewhere."""

_TILES = ("__AMX_TILE__", "__AMX_BF16__", "__AVX512BF16__", "__AVX512BW__", "__AVX512VL__")

_TIMEOUT_S = 120

_FOR_NOW = (
    "No space left",
    "Disk quota",
    "Cannot allocate",
    "out of memory",
    "memory exhausted",
    "Killed",
    "terminated",
)
"""What gcc and clang say where the machine lacks something, or one of their processes was ended."""

_compiling = ForkSafeLock()

_starting = unforked_lock()
"""Held while a program starts: a process forked meanwhile would keep pipes open whose end is waited for."""

_TRIAL = "#include <stdint.h>\n#include <string.h>\nint64_t trial(void) { return 0; }\n"

_LOADING = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); sys.exit(sys.float_info.min / 2 == 0)"
"""Ends well if a library can be loaded, and does not change how the processor treats small numbers."""


class Compiler(NamedTuple):
    """A compiler of C.

    Attributes:
        command: and options, with which it compiles for this processor.
        name: such as "gcc 12.2.0".
        vector_bytes: of this processor's registers.
        has_tiles: whether this processor multiplies tiles of bfloat16 (AMX), and the compiler knows how.
        identity: tells apart what compilers make for processors that differ.
    """

    command: tuple[str, ...]
    name: str
    vector_bytes: int
    has_tiles: bool
    identity: str

    @property
    def by_the_first_level(self) -> "Compiler":
        """The same by gcc's first level of optimisation; clang's leaves more out."""
        return self._replace(command=(*self.command, "-O1")) if self.name.startswith("gcc") else self


@functools.cache
def compiler() -> Compiler | None:
    """Return the compiler that the variable CC names, or else cc, gcc or clang; None if there is none.

    It is asked once a process, in some tenths of a second, and has to make a library that can be loaded. One
    that is named and does not is told of by a warning, unless it is "none"; and so is one that cannot now.
    """
    text = os.environ.get("CC", "").strip()
    found, lack = _able(text)
    if found is None and lack:
        warn_user(
            "The C compiler lacks something now, so this process computes no convolution in C, which is "
            f"slower, and refuses plans that do: {lack} Free some room or memory, or set TMPDIR, and start "
            "again.",
            BackendWarning,
        )
    elif found is None and text not in ("", "none"):
        warn_user(
            f"The variable CC names a compiler that cannot make a library here, {text!r}, so no convolution "
            "is computed in C, which is faster. Without CC it is cc, gcc or clang; CC=none does without one, "
            "and without this warning.",
            BackendWarning,
        )
    return found


class _Sought(NamedTuple):
    """The compiler that was found, if any; else what it says if it may serve another time."""

    found: Compiler | None = None
    lack: str = ""


@functools.cache  # also where a warning is an error
def _able(text: str) -> _Sought:
    """Return the first compiler that makes a library: the one that `text` names, or else a usual one."""
    try:
        named = shlex.split(text)
    except ValueError:  # a quotation without an end
        named = [text]
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(words[0]) is None:
            continue
        for native in _NATIVE:
            try:
                found = _asked((*words, *native))
                if found is not None and _is_able(found):
                    return _Sought(found)
            except CompilationError as error:  # with fewer instructions it would be another one
                return _Sought(lack=f"{str(error).removesuffix('.')}.")
    return _Sought()


def needed_compiler() -> Compiler:
    """Return the compiler.

    Raises:
        BackendError: there is none.
    """
    found = compiler()
    if found is None:
        raise BackendError(
            "There is no C compiler: neither what the variable CC names nor, without it, cc, gcc or clang."
        )
    return found


def description() -> str:
    """Return the compiler's name, on which times and roundings depend; "none" if there is none."""
    found = compiler()
    return "none" if found is None else found.name


def compiled_folder() -> Path:
    """Return where libraries are kept; it may be deleted."""
    return cache_folder() / "compiled"


def library(source: str, *, is_plain: bool = False) -> ctypes.CDLL:
    """Return the library of that source: from the cache folder, or compiled in some seconds.

    Args:
        source: in C.
        is_plain: whether it runs as fast by gcc's first level of optimisation, which takes half the time.

    Raises:
        BackendError: there is no compiler, or it cannot compile it; this process does not ask again.
        CompilationError: it could not now, for want of room or time; it is asked again after a minute or
            more, unless it was given all the time there is.
    """
    asked = (source, is_plain)
    with _compiling:  # two threads would compile the same
        found = _known.get(asked)
        if found is None or (isinstance(found, _Failure) and found.until_s < time.monotonic()):
            found = _known[asked] = _made(source, is_plain)
    if isinstance(found, _Failure):
        raise found.kind(found.text)
    return found


_PATIENCE_S, _PATIENCE = 60, 20
"""How long a failure is believed: so many seconds, and so many times as long as it took, so that little time
goes into failing."""


class _Failure(NamedTuple):
    """Why a source is no library: in words, as an error would keep alive whatever its callers have held.

    Attributes:
        kind: of error.
        text: what it says.
        until_s: when there may be room and time again, by the monotonic clock.
    """

    kind: type[BackendError]
    text: str
    until_s: float

    @classmethod
    def of(cls, error: BackendError, begun_s: float) -> "_Failure":
        """Return what is kept of an error, of what was begun at that time."""
        now_s = time.monotonic()
        took_s = now_s - begun_s
        may_pass = isinstance(error, CompilationError) and took_s < _TIMEOUT_S
        patience_s = max(_PATIENCE_S, _PATIENCE * took_s) if may_pass else math.inf
        return cls(type(error), str(error), now_s + patience_s)


_known: dict[tuple[str, bool], ctypes.CDLL | _Failure] = {}
"""What this process has asked for."""


def _made(source: str, is_plain: bool) -> ctypes.CDLL | _Failure:
    begun_s = time.monotonic()
    try:
        return _loaded(source, needed_compiler().by_the_first_level if is_plain else needed_compiler())
    except BackendError as error:
        pass_on_interruption(error)
        return _Failure.of(error, begun_s)
    except OSError as error:
        pass_on_interruption(error)
        text = f"A compiled convolution could not be kept or loaded: {error}"
        return _Failure.of(CompilationError(text), begun_s)


def _loaded(source: str, found: Compiler) -> ctypes.CDLL:
    key = _digest("\0".join([source, found.identity, *found.command]).encode())
    folder = compiled_folder()
    with contextlib.suppress(OSError):
        for kept in sorted(folder.glob(f"{key}-*.so")):
            if kept.name == _name_of(key, kept.read_bytes()):  # a part of a library would end the process
                return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="mucudnn-") as own:
        made = Path(own, "library.so")
        _compile(found, source, made)
        with contextlib.suppress(OSError):  # a folder that cannot be written costs the next process its time
            return ctypes.CDLL(str(_kept(made.read_bytes(), folder, key)))
        return ctypes.CDLL(str(made))


def _name_of(key: str, content: bytes) -> str:
    """Return the name of a library in the cache folder: what it was made of, and what it is."""
    return f"{key}-{_digest(content)}.so"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _asked(command: tuple[str, ...]) -> Compiler | None:
    """Return what a compiler says of itself and of this processor; None if it does not answer.

    Raises:
        CompilationError: it cannot now, as there is no folder for its drafts.
    """
    try:
        said = _said([*command, "-dM", "-E", "-x", "c", "-"], "")
    except (OSError, subprocess.SubprocessError) as error:
        pass_on_interruption(error)
        return None
    kind = "clang" if "__clang__" in said else "gcc"
    version = re.search(r'__VERSION__ "(?:\D* )?([\d.]+)', said)
    vector_bytes = next((n for macro, n in _VECTOR_BYTES if f"#define {macro} " in said), 16)
    name = f"{kind} {version[1] if version else 'of an unknown version'}"
    has_tiles = all(f"#define {macro} " in said for macro in _TILES)
    identity = hashlib.sha256(said.encode()).hexdigest()
    return Compiler((*command, *_OPTIONS), name, vector_bytes, has_tiles, identity)


def _is_able(found: Compiler) -> bool:
    """Return whether a compiler has what it takes beside itself: headers, a linker, flags that agree.

    What it makes is first loaded by another process, since a sanitizer ends one that it does not know, and
    fast mathematics leave a processor that takes small numbers for zeros. Nothing may be loaded from a file
    system that is mounted so, as one of drafts may be: then it is loaded from where libraries are kept.

    Raises:
        CompilationError: it cannot now, for want of room or time.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="mucudnn-") as folder:
            made = Path(folder, "trial.so")
            _compile(found, _TRIAL, made)
            return _can_be_loaded(made) or _can_be_loaded_where_kept(made)
    except CompilationError:
        raise
    except OSError as error:
        pass_on_interruption(error)
        raise CompilationError(f"{found.name} could not be tried: {error}") from error
    except (BackendError, subprocess.SubprocessError):
        return False


def _can_be_loaded_where_kept(library: Path) -> bool:
    try:
        compiled_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix="trial-", dir=compiled_folder()) as folder:
            return _can_be_loaded(Path(shutil.copy(library, folder)))
    except OSError as error:
        pass_on_interruption(error)
        return False  # nothing can be kept


def _can_be_loaded(library: Path) -> bool:
    words = [sys.executable, "-I", "-S", "-c", _LOADING, str(library)]
    return not _ended(words, "", os.environ).returncode


def _compile(by: Compiler, source: str, place: Path) -> None:
    try:
        _said([*by.command, "-o", str(place), "-x", "c", "-"], source)
    except subprocess.CalledProcessError as error:
        first = next(iter(str(error.stderr).splitlines()), f"it ended with {error.returncode}")
        is_for_now = error.returncode < 0 or any(words in error.stderr for words in _FOR_NOW)
        kind = CompilationError if is_for_now else BackendError
        raise kind(f"{by.name} could not compile a convolution: {first}") from error
    except (OSError, subprocess.SubprocessError) as error:
        pass_on_interruption(error)
        raise CompilationError(f"{by.name} could not compile a convolution: {error}") from error


def _said(words: list[str], source: str) -> str:
    """Return what a compiler prints when it is given a source.

    Raises:
        CompilationError: there is no folder for its drafts.
        OSError, subprocess.SubprocessError: it cannot be run, or ends badly, or not in time.
    """
    try:
        folder = tempfile.gettempdir()  # which has room, if any has
    except OSError as error:
        pass_on_interruption(error)
        raise CompilationError(f"{words[0]} could not be run: {error}") from error
    ended = _ended(words, source, {**os.environ, "TMPDIR": folder})
    ended.check_returncode()
    return ended.stdout


def _ended(words: list[str], text: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a program that reads a text, as `subprocess.run` does; a fork waits until it has started.

    The text is a file. Of a pipe it would not see the end while a process that is forked meanwhile lives.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be run, or not in time.
    """
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        with _starting:
            process = subprocess.Popen(
                words, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
    with process:
        try:
            said, complaint = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, said, complaint)


def _kept(content: bytes, folder: Path, key: str) -> Path:
    """Put a library into the cache folder, whole or not at all; return where it is."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = folder / _name_of(key, content)
    handle, part = tempfile.mkstemp(dir=folder, suffix=".part")  # of this thread, on whichever machine
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(part).replace(place)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return place
