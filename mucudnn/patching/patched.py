"""What a patched module calls instead of its own method, and who serves its calls in compiled graphs."""

import contextlib
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.convolutions.calls import own_call
from mucudnn.convolutions.functions import Serving
from mucudnn.convolutions.modules import Call, Kind, call_of, padded
from mucudnn.convolutions.surroundings import is_of_a_class, is_transformed, overriding_mode, watcher
from mucudnn.examining.passes import is_examining
from mucudnn.patching.compiling import GraphServer, in_graph
from mucudnn.patching.routing import NotingRouter, Router
from mucudnn.patching.shapes import TunedShapes
from mucudnn.plan import Assignment, Plan


class GraphServers:
    """Serve the modules of a model, and of its deep copies, in compiled graphs; pickles begin anew.

    Modules whose tuned shapes are equal share one server, so that equal blocks and copies, compiled one by
    one, share one graph.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, GraphServer] = weakref.WeakValueDictionary()

    def __deepcopy__(self, memo: object) -> "GraphServers":
        """Have copies served by the same."""
        return self

    def __reduce__(self) -> tuple[type["GraphServers"], tuple[()]]:
        """Have pickles begin anew."""
        return GraphServers, ()

    def of(self, shapes: TunedShapes) -> GraphServer:
        """Return who serves a module as long as one of those that it serves is patched."""
        content = shapes.content
        if content is None:
            return _server(shapes)
        found = self._known.get(content)
        if found is None:
            found = self._known[content] = _server(shapes.for_others())
        return found


def _server(shapes: TunedShapes) -> GraphServer:
    router = Router((shapes.backend,), None, shapes.tell_device)
    return GraphServer(router, shapes.convolution, is_own_when_frozen=shapes.is_own_when_frozen)


class PatchedForward:
    """What a patched module has in the place of its method that computes the convolution.

    Attributes:
        is_mucudnn_patch: tells a patch where this class cannot be imported.
        is_resting: whether it computes as before, for a while or from now on.
        is_retired: whether that is from now on.
    """

    is_mucudnn_patch = True

    def __init__(self, module: nn.Module, kind: Kind, shapes: TunedShapes, servers: GraphServers) -> None:
        """Bind to one module.

        Args:
            module: the convolution.
            kind: its class.
            shapes: what it was tuned for.
            servers: of the model.
        """
        self._module = module
        self._kind = kind
        self._shapes = shapes
        self._servers = servers
        self.is_resting = self.is_retired = False  # here: graphs know whether an instance has an attribute
        self._build()

    def _build(self) -> None:
        self._router: Router = Router((self._shapes.backend,), self._module, self._shapes.tell_device)
        self._server = self._servers.of(self._shapes)
        self._name = self._server.name

    def __getstate__(self) -> dict[str, Any]:
        """Keep what was decided; the rest is built again. A copy of a resting patch rests for ever."""
        built = ("_router", "_server", "_name")
        state = {name: value for name, value in self.__dict__.items() if name not in built}
        return {**state, "is_retired": self.is_resting}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._build()

    @property
    def planned(self) -> Iterator[Assignment]:
        """What runs here by the plan that the module was patched with."""
        return (each for variant in self._shapes.planned for each in variant.assignments.values())

    @property
    def learnt(self) -> Sequence[Plan]:
        """What was tuned since the module was patched."""
        return self._shapes.learnt

    @property
    def __globals__(self) -> dict[str, Any]:
        """A function's global names, for which `torch.jit.script` asks; there is no function.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            "torch.jit.script takes no patched transposed convolution: mucudnn.restore(model) before."
        )

    @property
    def method(self) -> str:
        """Name of the module's method that this stands for."""
        return self._kind.method

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Compute as before for a while."""
        was_resting, self.is_resting = self.is_resting, True
        try:
            yield
        finally:
            self.is_resting = was_resting or self.is_retired

    @contextlib.contextmanager
    def noted(self) -> Iterator[NotingRouter]:
        """Yield what knows of the calls during the block, but for those in graphs."""
        router = self._router
        self._router = noting = NotingRouter(router)
        try:
            yield noting
        finally:
            self._router = router

    def retire(self, module: nn.Module) -> None:
        """Compute as before from now on: `module` is restored, but somebody may go on calling this.

        Nothing happens if this belongs to another module, of which `module` is a shallow copy.
        """
        if module is self._module:
            self.is_retired = self.is_resting = True

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's convolution, divided where the shapes were tuned."""
        call = call_of(self._kind, self._module, args, kwargs)
        if self.is_resting:
            result = None
        elif torch.compiler.is_compiling():
            result = in_graph(call, self._module, self._name)
        elif (
            call.image is None
            or call.weight is None
            or is_transformed(call.image, call.weight, call.bias)
            or overriding_mode() is not None
        ):
            self._router.pass_by()
            if is_of_a_class(call.image, call.weight, call.bias) and overriding_mode() is None:
                with Serving(self._served):
                    return self._own(call, args, kwargs)
            result = None
            self._tell_watcher(call)
        else:
            result = self._router.served(call, self._shapes.convolution)
        return self._own(call, args, kwargs) if result is None else result

    def _own(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return what the module's method returns."""
        if not self._kind.is_transposed or not isinstance(call.weight, Tensor):
            return self._kind.own(self._module, *args, **kwargs)
        # The module's own method would read its weight again, which may be one that is computed.
        image, arguments = padded(self._module, call)
        return own_call(image, call.weight, call.bias, arguments)

    def _served(self, call: Call) -> Tensor | None:
        """Return the convolution for tensors of a class of their own, or None for PyTorch's own."""
        if is_transformed(call.image, call.weight, call.bias):
            self._tell_watcher(call)
            return None
        return self._router.served(call, self._shapes.convolution)

    def _tell_watcher(self, call: Call) -> None:
        """Warn if PyTorch's own computes a call only because somebody watches."""
        found = None if is_examining() else watcher(call.image, call.weight, call.bias)
        if found is not None:
            reason, words = found
            self._shapes.tell(reason, f"is called {words}")
