"""What the parts of algorithms' names mean, for those who read them in a plan."""

import re
from collections.abc import Iterable

_MEANINGS = (
    (r"^cc_", "{}: code in C"),
    (r"^bf16x[123]", "{}: products of bfloat16 by the matrix unit"),
    (r"^onednn_n\w+", "{}: PyTorch's own in the other layout, between copies"),
    (r"^(winograd|fft)\d+", "{}: tiles by torch's operations, on a GPU by kernels that CuPy compiles"),
    (r"^eng\d+", "{}: an engine of cuDNN, its knobs behind it"),
    (r"_mt\d+", "{}: so many threads compute a block each"),
    (r"_(rows|images|slices|k|c)\d+(?![\d=])", "{} and the like: how much is computed at a time"),
)
"""Pattern of a part, and what it says of an algorithm."""

_MORE = "The table of all: mucudnn/algorithms/README.md."


def meanings(names: Iterable[str]) -> str | None:
    """Return what there is to know of the names' parts, each by its first example; None if there is nothing.

    Args:
        names: ids of algorithms without their backends.
    """
    names = sorted(names)
    found = [
        meaning.format(example[0])
        for pattern, meaning in _MEANINGS
        if (example := next(filter(None, (re.search(pattern, name) for name in names)), None))
    ]
    return f"{'; '.join(found)}. {_MORE}" if found else None
