"""Kernels for cards, compiled by gcc: CUDA C that keeps to C, whose threads run one after the other."""

import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mucudnn.backends.cudnn.compiler import KernelLaunch

_HEAD = """\
static unsigned long long number_of_thread;
#define CUDA
#define INLINE static inline
#define NUMBER ((count_t)number_of_thread)
"""

_TAIL = """
void all(unsigned long long threads, {parameters})
{{
    for (number_of_thread = 0; number_of_thread < threads; ++number_of_thread) {kernel}({names});
}}
"""


@functools.cache
def compiled(source: str, kernel: str) -> KernelLaunch:
    """Return what runs all threads of the kernel of that name in `source`, on addresses of the host."""
    assert type(kernel) is str  # CuPy takes no others
    parameters = re.search(rf"CUDA void {kernel}\(([^)]*)\)", source)[1]
    names = [re.search(r"\w+$", parameter.strip())[0] for parameter in parameters.split(",")]
    tail = _TAIL.format(parameters=parameters, kernel=kernel, names=", ".join(names))
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "kernel.c"), Path(folder, "kernel.so")
        code.write_text(_HEAD + source + tail)
        command = ["gcc", "-O1", "-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared"]
        subprocess.run([*command, "-fPIC", "-o", str(library), str(code)], check=True)
        run = ctypes.CDLL(str(library)).all
    run.restype = None

    def launch(stream: int, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        assert len(arguments) == len(names)
        assert all(type(each) is int for each in arguments)
        run(ctypes.c_ulonglong(blocks * threads), *map(ctypes.c_longlong, arguments))

    return launch
