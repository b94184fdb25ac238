"""What a pass writes to that was there before it: remembered while it runs, and put back afterwards."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten

WRITES_UNSAID = frozenset(
    {_ATEN.native_batch_norm.default, _ATEN.cudnn_batch_norm.default, _ATEN.miopen_batch_norm.default}
)
"""Functions that write to what their schemas do not name."""

_RUNNING = slice(3, 5)
"""Which of their arguments: running mean and variance."""


class _Former(NamedTuple):
    """What a tensor was before it was written to."""

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
        is_same = place_of(self.tensor) == self.storage._cdata
        if not is_same or there != (self.offset, self.size, self.stride):
            with _writing_to(self.tensor):
                self.tensor.set_(self.storage, self.offset, self.size, self.stride)


class FormerTensors:
    """What plain tensors were before they were written to, through whatever view of their storage."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Former] = {}  # by storage and tensor
        self._contents: dict[int, torch.UntypedStorage] = {}  # by storage, which tensors may share

    def know(self, tensor: Tensor) -> bool:
        """Return whether a tensor, in the storage that it has now, is remembered."""
        return (place_of(tensor), id(tensor)) in self._known

    def remember(self, tensor: Tensor) -> None:
        """Remember what a tensor is that is about to be written to."""
        if self.know(tensor):
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        content = self._contents[place] if place in self._contents else storage.clone()
        self._contents[place] = content
        self._known[place, id(tensor)] = _Former(
            tensor, storage, content, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    def put_back(self) -> None:
        """Put back what they were."""
        known, self._known, self._contents = self._known, {}, {}
        with contextlib.ExitStack() as stack:  # one that cannot be does not keep the others from it
            for each in known.values():
                stack.callback(each.put_back)


@contextlib.contextmanager
def _writing_to(tensor: Tensor) -> Iterator[None]:
    """Write to a tensor outside of autograd; to what inference mode has made only in it."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        yield


class _FormerModuleTensor(NamedTuple):
    """A module's own tensor, where it lay, and what it held if nobody sees who writes to it."""

    tensor: Tensor
    there: Tensor
    content: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, *, has_content: bool) -> "_FormerModuleTensor":
        """Return what a tensor is."""
        with torch.no_grad():
            return cls(tensor, tensor.detach(), tensor.clone() if has_content else None)

    def put_back(self) -> None:
        """Have the tensor be that again."""
        with _writing_to(self.tensor):
            if is_plain(self.tensor) and place_of(self.tensor) != place_of(self.there):
                self.tensor.data = self.there
            if self.content is not None:
                self.tensor.copy_(self.content)


class Writes(TorchDispatchMode):
    """Computes as ever, and remembers what tensors and generators from before were before they changed.

    Buffers are remembered from the start, as some are written to by what no dispatcher sees.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """Remember where the tensors of modules lie."""
        super().__init__()  # type: ignore[no-untyped-call]  # not in torch's hints
        self._former = FormerTensors()
        self._owned: list[_FormerModuleTensor] = []
        for module in modules:
            for parameter in module.parameters(recurse=False):
                self._owned.append(_FormerModuleTensor.of(parameter, has_content=False))
            for buffer in module.buffers(recurse=False):
                if is_plain(buffer) and not buffer.is_meta:
                    self._former.remember(buffer)
                self._owned.append(_FormerModuleTensor.of(buffer, has_content=not is_plain(buffer)))
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._made: set[int] = set()  # storages of the pass's own
        self._watched: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and remember what it is about to write to."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # of a higher order; what it runs is not seen
            return func(*args, **kwargs)
        written = written_by(func, args, kwargs)
        if func in WRITES_UNSAID:
            written += tensors_in(args[_RUNNING])
        for tensor in filter(is_plain, written):
            # Memory of NumPy's is nobody's here, though it may lie where the pass had some.
            if place_of(tensor) not in self._made or not tensor.untyped_storage().resizable():
                self._former.remember(tensor)
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Generator) and id(each) not in self._generators:
                self._generators[id(each)] = (each, each.get_state())
        given = set(map(place_of, filter(is_plain, tensors_in((args, kwargs)))))
        result = func(*args, **kwargs)
        if func is _ATEN.lift_fresh.default:  # of what was made just now
            given = set()
        found = [*filter(is_plain, tensors_in(result))]
        self._made.update(place for place in map(place_of, found) if place not in given)
        self._watched.extend(weakref.ref(each) for each in found if place_of(each) in self._made)
        return result

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors from before be written to, and remain so."""
        self._made.update(map(place_of, filter(is_plain, tensors)))

    def own(self, tensors: Sequence[Tensor]) -> None:
        """Take tensors for made by the pass, so that nobody may keep them."""
        self.leave(tensors)
        self._watched.extend(map(weakref.ref, tensors))

    def alive(self) -> list[Tensor]:
        """Return the tensors that the pass has made and somebody still holds."""
        held = (each() for each in self._watched)
        return [tensor for tensor in held if tensor is not None]

    def put_back(self) -> None:
        """Put back what tensors and generators from before were."""
        generators, self._generators = self._generators, {}
        with contextlib.ExitStack() as stack:  # one that cannot be does not keep the others from it
            for each in self._owned:
                stack.callback(each.put_back)
            stack.callback(self._former.put_back)
            for generator, state in generators.values():
                stack.callback(generator.set_state, state)


def tensors_in(values: object) -> list[Tensor]:
    """Return the tensors among values, of any structure that PyTorch knows."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a function says it writes to."""
    if not func._schema.is_mutable:
        return []
    named = zip(func._schema.arguments, args, strict=False)
    given = {**{argument.name: value for argument, value in named}, **kwargs}
    return tensors_in(
        [
            given.get(each.name)
            for each in func._schema.arguments
            if each.alias_info and each.alias_info.is_write
        ]
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is of no class of its own, and strided: then it has a storage."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def place_of(tensor: Tensor) -> int:
    """Return what tells a plain tensor's storage from others as long as both are there."""
    place: int = tensor.untyped_storage()._cdata
    return place
