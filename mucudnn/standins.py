"""The mode in which a model runs on tensors without values: what they stand for, and which there were."""

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten

_CONTIGUOUS = frozenset({_ATEN._weight_norm_interface.default})
"""Functions whose results are contiguous, whatever their stand-ins are."""

_CONTIGUOUS_ON_CPU = frozenset({_ATEN.log_sigmoid_forward.default, _ATEN.rrelu_with_noise.default})

_LIKE_INPUT_ON_CPU = frozenset(
    {
        _ATEN.channel_shuffle.default,
        _ATEN.max_unpool2d.default,
        _ATEN.reflection_pad3d.default,
        _ATEN.replication_pad3d.default,
        _ATEN.roll.default,
    }
)
"""Functions whose results have the memory format of their input, though their stand-ins are contiguous."""


_OF_TWO = frozenset({_ATEN.add.Tensor, _ATEN.mul.Tensor, _ATEN.sub.Tensor})

_CONTIGUOUS_AS_INPUT_ON_CPU = _OF_TWO | {
    _ATEN.elu.default,
    _ATEN.gelu.default,
    _ATEN.hardsigmoid.default,
    _ATEN.hardswish.default,
    _ATEN.leaky_relu.default,
    _ATEN.mish.default,
    _ATEN.native_batch_norm.default,
    _ATEN.relu.default,
    _ATEN.sigmoid.default,
    _ATEN.silu.default,
    _ATEN.softplus.default,
    _ATEN.tanh.default,
}
"""Functions whose results are contiguous if all inputs are, though their stand-ins keep the strides of images
of one channel in channels last, which are both: what comes after goes by strides."""


_WRITES_UNSAID = frozenset(
    {_ATEN.native_batch_norm.default, _ATEN.cudnn_batch_norm.default, _ATEN.miopen_batch_norm.default}
)
"""Functions that write to what their schemas do not name."""

_MOST_BYTES = 2**26
"""Of a tensor that is made of numbers alone: larger ones are noise or padding, and kept by nobody."""


class _Former(NamedTuple):
    """What a tensor from before the pass was before it was written to."""

    tensor: Tensor
    storage: torch.UntypedStorage
    content: torch.UntypedStorage
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def put_back(self) -> None:
        """Have the tensor be that again."""
        if self.storage.nbytes() != self.content.nbytes():
            self.storage.resize_(self.content.nbytes())
        self.storage.copy_(self.content)
        there = (self.tensor.storage_offset(), self.tensor.size(), self.tensor.stride())
        is_same = _place(self.tensor) == self.storage._cdata
        if not is_same or there != (self.offset, self.size, self.stride):
            with torch.no_grad():
                self.tensor.set_(self.storage, self.offset, self.size, self.stride)


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
        self._before: dict[tuple[int, int], _Former] = {}  # by storage and tensor
        self._watched: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on stand-ins, or on tensors with values if it is given no other."""
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if func is _ATEN.lift_fresh.default:  # of memory that was used before, maybe
            self._stale.difference_update(map(_place, filter(_is_plain, given)))
        if self._is_computed(func, args, kwargs, given):
            return self._computed(func, args, kwargs, given)
        written = _written(func, args, kwargs)
        self._stale.update(map(_place, filter(_is_plain, written)))
        result = self._standing_in(func, args, kwargs)
        self.watch((result, *written))
        return result

    def _is_computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]
    ) -> bool:
        """Return whether a function is computed: of numbers and tensors with values, and nothing huge."""
        if func in _WRITES_UNSAID or _draws(kwargs) or not all(map(self._has_values, given)):
            return False
        if given:
            return True
        made = _tensors(func(*args, **kwargs))  # stand-ins: the mode that makes them is still there
        return sum(each.numel() * each.element_size() for each in made) <= _MOST_BYTES

    def _computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]
    ) -> Any:
        written = [*filter(_is_plain, _written(func, args, kwargs))]
        with unset_fake_temporarily():
            for each in written:
                self._remember(each)
            result = func(*args, **kwargs)
        made = set(map(_place, filter(_is_plain, _tensors(result))))
        if func is not _ATEN.lift_fresh.default:
            made.difference_update(map(_place, filter(_is_plain, given)))  # a view is nothing new
        self._made |= made
        self._stale -= made  # memory is used again
        self.watch(result)  # to which something without values may be written
        return result

    def watch(self, values: object) -> None:
        """Remember the tensors among values, of any structure, as long as somebody holds them."""
        self._watched.extend(map(weakref.ref, _tensors(values)))

    def _remember(self, tensor: Tensor) -> None:
        """Remember what a tensor is that is about to be written to, unless the pass has made it.

        Memory of NumPy's, which does not resize, may be anybody's: what is written there is not kept either.
        """
        storage = tensor.untyped_storage()
        place, key = storage._cdata, (storage._cdata, id(tensor))
        if (place in self._made and storage.resizable()) or key in self._before:
            return
        self._stale.update({place} & self._made)
        known = (each.content for each in self._before.values() if each.storage._cdata == place)
        content = next(known, None) or storage.clone()
        self._before[key] = _Former(
            tensor, storage, content, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    def put_back(self) -> None:
        """Put back what tensors from before the pass were."""
        before, self._before = self._before, {}
        with contextlib.ExitStack() as stack:  # one that cannot be does not keep the others from it
            for each in before.values():
                stack.callback(each.put_back)

    @staticmethod
    def _standing_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        order = _order_of_result(func, args)
        if order is None:
            return result
        first, *others = result if isinstance(result, tuple) else (result,)
        first = torch.empty_like(first, memory_format=order)
        return (first, *others) if isinstance(result, tuple) else first

    def _has_values(self, tensor: Tensor) -> bool:
        return _is_plain(tensor) and not tensor.is_meta and _place(tensor) not in self._stale

    def has_none(self, tensor: Tensor) -> bool:
        """Return whether a tensor has no values: it is a stand-in, or was written to by functions of one."""
        is_stale = _is_plain(tensor) and _place(tensor) in self._stale & self._made
        return is_stale or isinstance(tensor, FakeTensor)

    def alive(self) -> list[Tensor]:
        """Return the tensors without values that somebody still holds, but for those from before the pass."""
        held = (each() for each in self._watched)
        return [tensor for tensor in held if tensor is not None and self.has_none(tensor)]


def _tensors(values: object) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a function writes to."""
    if not func._schema.is_mutable:
        return []
    named = zip(func._schema.arguments, args, strict=False)
    given = {**{argument.name: value for argument, value in named}, **kwargs}
    return _tensors(
        [
            given.get(each.name)
            for each in func._schema.arguments
            if each.alias_info and each.alias_info.is_write
        ]
    )


def _draws(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function draws from a generator of the model's own, which would go on."""
    return any(isinstance(each, torch.Generator) for each in kwargs.values())


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is of no class of its own, and strided: then it has a storage."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _order_of_result(func: object, args: tuple[Any, ...]) -> torch.memory_format | None:
    """Return the memory format of a function's first result, or None where it is that of the stand-in."""
    if func in _CONTIGUOUS:
        return torch.contiguous_format
    if args and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
        if func in _CONTIGUOUS_ON_CPU:
            return torch.contiguous_format
        if func in _LIKE_INPUT_ON_CPU:
            return suggest_memory_format(args[0])
        if func in _CONTIGUOUS_AS_INPUT_ON_CPU and _are_contiguous(args[: 2 if func in _OF_TWO else 1]):
            return torch.contiguous_format
    return None


def _are_contiguous(inputs: tuple[Any, ...]) -> bool:
    """Return whether a function's inputs are contiguous and of one shape, which no number is."""
    return all(
        isinstance(each, Tensor) and each.shape == inputs[0].shape and each.is_contiguous() for each in inputs
    )
