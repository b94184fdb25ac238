"""The mode in which a model runs on tensors without values: what they stand for, and which there were."""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.examining.elementwise import elementwise_strides
from mucudnn.examining.writes import WRITES_UNSAID, FormerTensors, is_plain, place_of, tensors_in, written_by

_ATEN = torch.ops.aten

_CONTIGUOUS = frozenset(
    {
        _ATEN._weight_norm_interface.default,
        _ATEN.masked_fill.Scalar,
        _ATEN.masked_fill.Tensor,
        _ATEN.pow.Scalar,
    }
)
"""Functions whose results are contiguous, whatever their stand-ins are."""

_CONTIGUOUS_ON_CPU = frozenset(
    {
        _ATEN._log_softmax.default,
        _ATEN.log_sigmoid_forward.default,
        _ATEN.native_layer_norm.default,
        _ATEN.rrelu_with_noise.default,
    }
)
"""Functions whose results are so on processors."""

_LIKE_INPUT_ON_CPU = frozenset(
    {
        _ATEN._upsample_nearest_exact2d.default,
        _ATEN._upsample_nearest_exact3d.default,
        _ATEN.channel_shuffle.default,
        _ATEN.max_unpool2d.default,
        _ATEN.native_group_norm.default,
        _ATEN.reflection_pad3d.default,
        _ATEN.replication_pad3d.default,
        _ATEN.roll.default,
        _ATEN.upsample_bicubic2d.default,
        _ATEN.upsample_bilinear2d.default,
        _ATEN.upsample_nearest2d.default,
        _ATEN.upsample_nearest3d.default,
        _ATEN.upsample_trilinear3d.default,
    }
)
"""Functions whose results have the memory format that the strides of their input suggest."""

_VIEWS = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels last, by the number of axes."""

_MOST_BYTES = 2**26
"""Of a tensor that is made of numbers alone: larger ones are noise or padding, and kept by nobody."""


class StandIns(TorchDispatchMode):
    """Computes what depends on no stand-in, and gives stand-ins the strides that a computation gives.

    A grid of positions, say, is made of numbers alone. Many a model keeps one for later calls, in the cache
    of a function or anywhere else, and there it must have its values. So what functions make of numbers and
    of such tensors has values here as well; what they make of an image or a parameter has none. To tensors
    from before the pass is written as well: `put_back` ends that, for other threads' writes too.

    Strides decide the layout of a convolution. A weight under weight norm, say, is computed contiguous, but
    its stand-in keeps the strides of what it is computed from: of a depthwise filter those of channels last.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not in torch's hints
        self._made: set[int] = set()  # storages that only the pass can know
        self._stale: set[int] = set()  # storages with values to which something without values was written
        self._former = FormerTensors()
        self._watched: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on stand-ins, or on tensors with values if it is given no other."""
        kwargs = kwargs or {}
        result = in_pieces(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        given = tensors_in((args, kwargs))
        if func is _ATEN.lift_fresh.default:  # of memory that was used before, maybe
            self._stale.difference_update(map(place_of, filter(is_plain, given)))
        if self._is_computed(func, args, kwargs, given):
            return self._computed(func, args, kwargs, given)
        written = written_by(func, args, kwargs)
        self._stale.update(map(place_of, filter(is_plain, written)))
        result = self._standing_in(func, args, kwargs)
        self.watch((result, *written))
        return result

    def _is_computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]
    ) -> bool:
        """Return whether a function is computed: of numbers and tensors with values, and nothing huge."""
        if func in WRITES_UNSAID or _draws(args, kwargs) or not all(map(self._has_values, given)):
            return False
        if given:
            return True
        made = tensors_in(func(*args, **kwargs))  # stand-ins: the mode that makes them is still there
        return sum(each.numel() * each.element_size() for each in made) <= _MOST_BYTES

    def _computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]
    ) -> Any:
        written = [*filter(is_plain, written_by(func, args, kwargs))]
        with unset_fake_temporarily():
            for each in written:
                self._remember(each)
            result = func(*args, **kwargs)
        made = set(map(place_of, filter(is_plain, tensors_in(result))))
        if func is not _ATEN.lift_fresh.default:
            made.difference_update(map(place_of, filter(is_plain, given)))  # a view is nothing new
        self._made |= made
        self._stale -= made  # memory is used again
        self.watch(result)  # to which something without values may be written
        return result

    def watch(self, values: object) -> None:
        """Remember the tensors among values, of any structure, as long as somebody holds them."""
        self._watched.extend(map(weakref.ref, tensors_in(values)))

    def _remember(self, tensor: Tensor) -> None:
        """Remember what a tensor is that is about to be written to, unless the pass has made it.

        Memory of NumPy's, which does not resize, may be anybody's: what is written there is not kept either.
        """
        place = place_of(tensor)
        is_made = place in self._made
        if (is_made and tensor.untyped_storage().resizable()) or self._former.know(tensor):
            return
        if is_made:
            self._stale.add(place)
        self._former.remember(tensor)

    def put_back(self) -> None:
        """Put back what tensors from before the pass were."""
        self._former.put_back()

    @staticmethod
    def _standing_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func in _VIEWS:
            return _viewed(args[0], result)
        first, *others = result if isinstance(result, tuple) else (result,)
        if not isinstance(first, Tensor) or first.is_nested or first.layout is not torch.strided:
            return result
        order = _order_of_result(func, args)
        strides = None if order else elementwise_strides(func, args, kwargs, tuple(first.shape))
        if order:
            first = torch.empty_like(first, memory_format=order)
        elif strides is not None and strides != first.stride():
            first = first.new_empty_strided(first.shape, strides)
        return (first, *others) if isinstance(result, tuple) else first

    def _has_values(self, tensor: Tensor) -> bool:
        return is_plain(tensor) and not tensor.is_meta and place_of(tensor) not in self._stale

    def has_none(self, tensor: Tensor) -> bool:
        """Return whether a tensor has no values: it is a stand-in, or was written to by functions of one."""
        is_stale = is_plain(tensor) and place_of(tensor) in self._stale & self._made
        return is_stale or isinstance(tensor, FakeTensor)

    def alive(self) -> list[Tensor]:
        """Return the tensors without values that somebody still holds, but for those from before the pass."""
        held = (each() for each in self._watched)
        return [tensor for tensor in held if tensor is not None and self.has_none(tensor)]


@contextlib.contextmanager
def in_mode_of(model: nn.Module) -> Iterator[bool]:
    """Yield whether a model is differentiated: in training it is, in inference mode too, which ends here."""
    is_differentiated = model.training or torch.is_grad_enabled()
    with torch.inference_mode(torch.is_inference_mode_enabled() and not model.training):
        yield is_differentiated


def out_of_inference_mode(model: nn.Module) -> torch.inference_mode:
    """Return a context out of inference mode, unless the model has tensors that were made in it.

    What is composed of several functions reaches modes in one piece there, and autocast sees none of those.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    has_its_own = any(tensor.is_inference() for tensor in tensors)
    return torch.inference_mode(torch.is_inference_mode_enabled() and has_its_own)


def in_pieces(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that is composed of others, which `mode` then sees; NotImplemented if it is none.

    In inference mode such arrive in one piece. They are composed as in C++: a decomposition in Python, which
    `func.decompose` prefers, may give other strides.
    """
    if not (torch.is_inference_mode_enabled() and _is_composed(func)):
        return NotImplemented
    with mode:
        return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@functools.cache
def _is_composed(func: Any) -> bool:
    key = DispatchKey.CompositeImplicitAutograd.name
    return func.namespace != "prim" and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _viewed(tensor: Tensor, result: Tensor) -> Tensor:
    """Return a view with the strides that it has elsewhere; of sizes of one, stand-ins' differ."""
    with unset_fake_temporarily():
        pattern = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(result.shape)
    if pattern.stride() == result.stride():
        return result
    return tensor.as_strided(result.shape, pattern.stride())


def _draws(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function draws from a generator of the model's own, which would go on."""
    return any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))


def _order_of_result(func: object, args: tuple[Any, ...]) -> torch.memory_format | None:
    """Return the memory format of a function's first result, or None where it is that of the stand-in."""
    if func in _CONTIGUOUS:
        return torch.contiguous_format
    if args and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
        if func in _CONTIGUOUS_ON_CPU:
            return torch.contiguous_format
        if func in _LIKE_INPUT_ON_CPU:
            return suggest_memory_format(args[0])
        if func is _ATEN.native_batch_norm.default:
            return _order_of_batch_norm(args[0])
    return None


def _order_of_batch_norm(tensor: Tensor) -> torch.memory_format:
    """Return the memory format of what batch norm makes of a tensor; of one channel it is contiguous."""
    last = _LAST.get(tensor.dim(), torch.contiguous_format)
    if tensor.is_contiguous():
        return torch.contiguous_format
    return last if tensor.is_contiguous(memory_format=last) else suggest_memory_format(tensor)
