"""C that is compiled with all warnings."""

import subprocess
from pathlib import Path

from mucudnn.algorithms.compiled.compiler import needed_compiler


def assert_is_c_without_a_warning(source: str, folder: Path, *flags: str) -> None:
    """Compile a source to an object in a folder: for any processor, but with what flags add."""
    strict = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-function"]
    words = [*strict, *flags, "-std=gnu11", "-c", "-o", str(folder / "x.o"), "-x", "c", "-"]
    subprocess.run([needed_compiler().command[0], *words], input=source, text=True, check=True)
