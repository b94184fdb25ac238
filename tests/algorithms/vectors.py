"""Registers of other lengths than this processor's, which a compiler makes of those that there are."""

import types
from collections.abc import Callable, Iterator

import pytest

from mucudnn.algorithms.compiled import compiler as compilers


def have_vectors(n_bytes: int, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
    """Have modules write, and compile, C for registers of so many bytes.

    For others than this processor's it is compiled as it stands, in a third of the time: what gcc makes of
    those that there are is seen by all other tests.
    """
    found = compilers.needed_compiler()
    for module in modules:
        monkeypatch.setattr(module, "needed_compiler", lambda: found._replace(vector_bytes=n_bytes))
    if n_bytes != found.vector_bytes:
        as_it_stands = found._replace(command=(*found.command, "-O0"))
        monkeypatch.setattr(compilers, "needed_compiler", lambda: as_it_stands)


def lengths_of_vectors(kernels: types.ModuleType, *modules: types.ModuleType) -> Callable[..., Iterator[int]]:
    """Return a fixture: the length of registers of some modules, mostly another than this processor's.

    Args:
        kernels: whose `functions` are those of a length.
        modules: others that ask for it.
    """

    @pytest.fixture(params=[16, 32, 64])
    def vector_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
        have_vectors(request.param, monkeypatch, kernels, *modules)
        kernels.functions.cache_clear()
        yield request.param
        kernels.functions.cache_clear()

    return vector_bytes
