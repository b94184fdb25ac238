"""What tests of torch.compile share: a compiler that keeps what it is given, and a spy on what graphs run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mucudnn.patching.compiling import GraphServer

# Dynamo warns of its own use of deprecated functions of torch and Python.
DYNAMOS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Graphs:
    """A compiler that keeps the graphs that it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    @property
    def targets(self) -> list[str]:
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes]


def served(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list to which the image of each convolution is added that mucudnn's operator serves."""
    images: list[Tensor] = []
    own = GraphServer.compute
    monkeypatch.setattr(GraphServer, "compute", lambda *args: (images.append(args[1]), own(*args))[1])
    return images


def step(model: Any, images: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return what a model computes, and the gradients of its mean square."""
    y = model(images)
    return [y, *torch.autograd.grad(y.square().mean(), [images, *parameters])]
