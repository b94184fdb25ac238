"""Models, and parts of models, that compute otherwise than by their modules' methods: scripted, sharded."""

from collections.abc import Iterator

import torch
from torch import nn

from mucudnn.errors import NothingToTuneError, SampleError

SCRIPTED = "it is scripted or traced, and such modules run as they are"
_NODES = (
    "aten::_convolution",
    *(f"aten::conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)),
)
"""Convolutions in TorchScript's graphs."""


def check_unscripted(model: nn.Module) -> None:
    """Verify that the model is not TorchScript's, which does not call its modules' methods.

    Raises:
        NothingToTuneError: it is.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise NothingToTuneError(f"The model must have a convolution that can be divided, but {SCRIPTED}.")


_SHARDED = {"FSDPModule": "fully_shard", "FullyShardedDataParallel": "FullyShardedDataParallel"}
"""By what a module is sharded that is of such a class; neither need be imported here."""


def check_unsharded(model: nn.Module) -> None:
    """Verify that no part of the model is sharded by FSDP, of either version.

    Its hooks make parameters whole and keep in mind that they are, until a backward pass; after a pass that
    leaves the model as it was, the next step would meet sharded ones.

    Raises:
        SampleError: a part is.
    """
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _SHARDED:
                raise SampleError(
                    f"The model must be whole, but {f'its {path}' if path else 'it'} is sharded by "
                    f"{_SHARDED[kind.__name__]}; optimize it with a sample first, and shard then."
                )


def scripted_paths(model: nn.Module) -> Iterator[str]:
    """Yield the paths of modules in TorchScript that compute convolutions, of nested ones the outermost."""
    inner: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and module not in inner:
            inner.update(module.modules())
            graph = getattr(module, "inlined_graph", None)  # what has no forward has none
            if graph is not None and any(graph.findAllNodes(node) for node in _NODES):
                yield path
