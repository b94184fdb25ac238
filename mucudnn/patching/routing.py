"""Finding what runs a call of a module or function, worked out once for each shape."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mucudnn.backends import Backend, backend_name, backend_of
from mucudnn.convolutions.calls import has_its_bias
from mucudnn.convolutions.modules import Call, padded, pads_of, problem_of_call
from mucudnn.convolutions.surroundings import as_autocast, autocast_dtype, without_autocast
from mucudnn.errors import OptionError, ProblemError
from mucudnn.functional import DividedConvolution
from mucudnn.problem import ConvProblem

_MOST_ROUTES = 256
"""Shapes of which a router remembers what runs them; of more, it works that out again and again."""

Decide = Callable[[Backend, ConvProblem], DividedConvolution | None]
"""Returns what computes a forward pass and its gradients; None for PyTorch's own convolution.

Raises:
    NotNowError: that cannot be decided now.
"""


class NotNowError(Exception):
    """This call runs PyTorch's own, but nothing is decided: the next one like it asks again."""


class Route(NamedTuple):
    """What serves calls of one shape.

    Attributes:
        convolution: what runs.
        is_padded: whether the image is padded before.
        dtype: what autocast casts the tensors to; None where there is no autocast.
    """

    convolution: DividedConvolution
    is_padded: bool
    dtype: torch.dtype | None

    def run(self, module: nn.Module | None, call: Call) -> Tensor:
        """Return the convolution of the call."""
        image, weight, bias, *_ = call
        if self.is_padded:
            image, _ = padded(module, call)
        if self.dtype is None:
            return self.convolution(image, weight, bias)
        image, weight, bias = as_autocast(image, weight, bias, self.dtype)
        with without_autocast(self.dtype):
            return self.convolution(image, weight, bias)


class Router:
    """Finds what runs the calls of a module, or of functions."""

    def __init__(
        self,
        backends: tuple[str, ...],
        module: nn.Module | None,
        tell_device: Callable[[torch.device], None] | None = None,
    ) -> None:
        """Know of no shape yet.

        Args:
            backends: names of those that serve calls; PyTorch's own convolution serves others.
            module: whose calls they are; None for functions.
            tell_device: is told of each call on a device that is none of theirs.
        """
        self._backends = backends
        self._module = module
        self._tell_device = tell_device
        self._served: dict[torch.device, Backend] = {}
        self._routes: dict[Hashable, Route | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Have copies know of no shape; whoever wraps a patch may copy its attributes."""
        return {**self.__dict__, "_served": {}, "_routes": {}}

    def served(self, call: Call, decide: Decide, needs: Hashable = None) -> Tensor | None:
        """Return the convolution, or None where PyTorch's own serves the call; see `found`."""
        route = self.found(call, decide, needs)
        if route is not None:
            return route.run(self._module, call)
        image = call.image
        if image.dim() == call.weight.dim() - 1 and image.layout is torch.strided:
            result = self.served(call._replace(image=image.unsqueeze(0)), decide, needs)
            return None if result is None else result.squeeze(0)
        return None

    def found(self, call: Call, decide: Decide, needs: Hashable = None) -> Route | None:
        """Return what runs the call, or None for PyTorch's own; that is worked out once for each shape.

        Args:
            call: of a batch.
            decide: is asked for shapes that are not known.
            needs: what else its answer depends on.
        """
        image, weight, bias, arguments, padding_mode = call
        device = image.device
        backend = self._served.get(device)  # each look-up, and each function, takes time in every call
        if backend is None:
            backend = self._backend_for(device)
        if backend is None or not (image.layout is weight.layout is torch.strided):
            return None
        dtype = autocast_dtype(device)
        pads = None if padding_mode == "zeros" else pads_of(self._module)
        key = (
            image.shape, image.stride(), image.dtype, device, weight.shape, weight.stride(), weight.dtype,
            weight.device, None if bias is None else (bias.shape, bias.dtype, bias.device), dtype,
            backend.flags(), arguments, padding_mode, pads, needs,
        )  # fmt: skip
        try:
            return self._routes[key]
        except KeyError:
            pass
        if image.dim() != weight.dim():
            return None
        try:
            route = self._route(backend, call, dtype, decide)
        except NotNowError:
            return None
        self._remember(key, route)
        return route

    def pass_by(self) -> None:
        """Hear of a call that PyTorch's own serves without asking this router."""

    def _backend_for(self, device: torch.device) -> Backend | None:
        """Return the backend that serves a device; None if none of this router's does."""
        name = backend_name(device)
        if name not in self._backends:
            if self._tell_device is not None:
                self._tell_device(device)
            return None
        return self._served.setdefault(device, backend_of(name, device))

    def _route(self, backend: Backend, call: Call, dtype: torch.dtype | None, decide: Decide) -> Route | None:
        """Return what runs such calls, or None for PyTorch's own."""
        try:
            problem, is_padded = problem_of_call(self._module, call, dtype)
        except (OptionError, ProblemError):
            return None  # PyTorch's own says what is wrong, if anything is
        if not has_its_bias(problem, call.bias):
            return None
        convolution = decide(backend, problem)
        if convolution is None or convolution.is_own:
            return None
        return Route(convolution, is_padded, dtype)

    def _remember(self, key: Hashable, route: Route | None) -> None:
        """Put a route among the others, of which the oldest go when there are many; any thread may do so."""
        while len(self._routes) >= _MOST_ROUTES:
            oldest = next(iter([*self._routes]), None)
            self._routes.pop(oldest, None)
        self._routes[key] = route


class NotingRouter(Router):
    """A router that notes whether it was called, and which problems were served by what was decided.

    Attributes:
        is_asked: whether there was any call, whoever served it.
        served_problems: the problems of the forward passes of those that were served.
    """

    def __init__(self, like: Router) -> None:
        """Find what `like` finds; know of no shape yet."""
        super().__init__(like._backends, like._module, like._tell_device)
        self.is_asked = False
        self.served_problems: set[ConvProblem] = set()

    def pass_by(self) -> None:
        """Know that there was a call."""
        self.is_asked = True

    def found(self, call: Call, decide: Decide, needs: Hashable = None) -> Route | None:
        """Return what runs the call, and note of what problem that is."""
        self.is_asked = True
        route = super().found(call, decide, needs)
        if route is not None:
            self.served_problems.add(route.convolution.problem)
        return route
