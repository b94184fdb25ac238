"""Convolution modules: which of them can be divided, and what a call of one asks for."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.convolutions.calls import ConvArguments, explicit_padding, numbers, obstacle, problem_of
from mucudnn.convolutions.surroundings import as_autocast
from mucudnn.errors import OptionError, ProblemError
from mucudnn.problem import ConvProblem

_AUTOCAST_ITEMSIZE = 2
"""Bytes of the types that autocast computes in."""

_CAST_BY_AUTOCAST = ("float32", "float16", "bfloat16")
"""Types of parameters that autocast casts."""


def check_is_module(model: object) -> None:
    """Raise unless `model` is a module.

    Raises:
        OptionError: it is something else.
    """
    if isinstance(model, nn.Module):
        return
    got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise OptionError(f"A model must be a torch.nn.Module, but got {got}.")


def tuned_device(model: nn.Module) -> torch.device:
    """Return the device on which a model is tuned: that of its first dividable convolution, or its own.

    Those on the meta device, of which there are shapes alone, do not count.
    """
    for module in convolutions(model).values():
        place = None if undividable(module) else _place_of(module)
        if place is not None and place.type != "meta":
            return place
    return home_of(model)


def elsewhere(module: nn.Module, device: torch.device) -> str | None:
    """Return why a module is not tuned on `device`, if it lies on another kind; None if not."""
    place = _place_of(module)
    if place is None or place.type == device.type:
        return None
    return f"it lies on {place}, and those that are tuned on {device}"


def home_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter or buffer lies; the processor if it has none."""
    return _place_of(model) or torch.device("cpu")


def _place_of(module: nn.Module) -> torch.device | None:
    """Return where the first parameter or buffer lies, also while another thread examines the model.

    A stand-in says that it lies on the meta device as long as whoever made it computes with any of them.
    """
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    if tensor is None:
        return None
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of PyTorch's classes of convolutions.

    Attributes:
        base: the class.
        method: which of its methods computes the convolution, and nothing else; subclasses that replace it
            compute something of their own.
    """

    base: type[Any]
    method: str

    @property
    def own(self) -> Callable[..., Tensor]:
        """The class's method, as a function of the module and its arguments."""
        method: Callable[..., Tensor] = getattr(self.base, self.method)
        return method

    @property
    def is_transposed(self) -> bool:
        """Whether the convolution is a transposed one."""
        return self.method == "forward"


_KINDS = (
    *(Kind(base, "_conv_forward") for base in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    *(Kind(base, "forward") for base in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
)


class Call(NamedTuple):
    """One call of a convolution, of a module's or of a function.

    Attributes:
        image: (n, c, *size), or (c, *size) for one sample.
        weight: the filter.
        bias: (k,), or None.
        arguments: what decides the convolution too; of a module a user may change it at any time.
        padding_mode: what it is padded with; only a module's may be other than zeros.
    """

    image: Tensor
    weight: Tensor
    bias: Tensor | None
    arguments: ConvArguments
    padding_mode: str = "zeros"


def kind_of(module: nn.Module) -> Kind | None:
    """Return the class of convolutions that a module belongs to, or None if it is no convolution."""
    return next((kind for kind in _KINDS if isinstance(module, kind.base)), None)


def undividable(module: nn.Module) -> str | None:
    """Return why a convolution module cannot be divided, or None if it can."""
    kind, own = kind_of(module), type(module)
    if kind is None or getattr(own, kind.method) is not getattr(kind.base, kind.method):
        return f"{own.__name__} computes its convolution itself"
    if hasattr(module, "weight_fake_quant"):
        return f"{own.__name__} imitates a quantised convolution"
    replaced = module.__dict__.get(kind.method)
    if replaced is not None and not getattr(type(replaced), "is_mucudnn_patch", False):
        return f"its {kind.method} has been replaced by something else"
    return None


def convolutions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the convolution modules of a model by path, each shared one once."""
    return {path: module for path, module in model.named_modules() if kind_of(module) is not None}


def arguments_of(module: Any) -> ConvArguments:
    """Return a convolution's attributes that decide what it computes, but for its padding mode."""
    stride, padding, dilation = module.stride, module.padding, module.dilation
    if not (type(stride) is type(padding) is type(dilation) is tuple):  # else they are as they should be
        rank = len(module.kernel_size)
        stride, padding, dilation = (_along(each, rank) for each in (stride, padding, dilation))
    output_padding = numbers(module.output_padding, len(module.kernel_size)) if module.transposed else None
    return ConvArguments(stride, padding, dilation, module.groups, output_padding)


def _along(value: Any, rank: int) -> Any:
    """Return a number for each dimension, or what a padding is called; what is a tuple already is one."""
    return value if type(value) is tuple or isinstance(value, str) else numbers(value, rank)


def call_of(kind: Kind, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return what a call of the kind's method with these arguments asks for."""
    if kind.is_transposed:
        return _transposed_call(module, *args, **kwargs)
    return _plain_call(module, *args, **kwargs)


def _plain_call(
    module: Any,
    input: Tensor,  # noqa: A002  # PyTorch's name
    weight: Tensor,
    bias: Tensor | None,
) -> Call:
    return Call(input, weight, bias, arguments_of(module), module.padding_mode)


def _transposed_call(
    module: Any,
    input: Tensor,  # noqa: A002  # PyTorch's name
    output_size: Sequence[int] | None = None,
) -> Call:
    arguments = arguments_of(module)
    if output_size is not None:
        rank = len(module.kernel_size)
        sizes = (module.stride, module.padding, module.kernel_size, rank, module.dilation)
        output_padding = tuple(module._output_padding(input, output_size, *sizes))
        arguments = arguments._replace(output_padding=output_padding)
    return Call(input, module.weight, module.bias, arguments, module.padding_mode)


def pads_of(module: Any) -> tuple[int, ...]:
    """Return how many pixels a module that pads by pixels adds on each side, whatever its `padding` says."""
    return tuple(module._reversed_padding_repeated_twice)


def padded(module: Any, call: Call) -> tuple[Tensor, ConvArguments]:
    """Return the call's image and arguments, with only equal numbers of zeros on both sides left to pad.

    All other padding is done here. Without a module, None, the call is a function's. Under autocast the image
    is to be cast afterwards: reflected and replicated pixels are float32 there, and so are the sums of their
    gradients.
    """
    image, weight, _, arguments, padding_mode = call
    if padding_mode != "zeros":
        image = F.pad(image, pads_of(module), mode=padding_mode)
        arguments = arguments._replace(padding=(0,) * len(arguments.stride))
    # A weight of a class of its own may refuse to be asked.
    return explicit_padding(image, weight.shape[2:] if isinstance(arguments.padding, str) else (), arguments)


def problem_of_call(module: Any, call: Call, dtype: torch.dtype | None) -> tuple[ConvProblem, bool]:
    """Return the problem of a call's forward pass, and whether its image is padded before.

    Args:
        module: whose call it is; None for a function's.
        call: of a batch, or of one sample.
        dtype: what autocast casts the tensors to; None where there is no autocast.

    Raises:
        OptionError: its padding is a word that names none.
        ProblemError: its shapes fit no convolution, or it must be left to PyTorch as it is; then the message
            is the reason alone.
    """
    image, weight, bias, *_ = call
    reason = obstacle(*_as_computed(image, weight, bias, dtype))
    if reason is not None:
        raise ProblemError(reason)
    batch = image if image.dim() == weight.dim() else image.unsqueeze(0)
    with torch.no_grad():  # a checkpoint counts what is saved, and knows nothing of this
        image, arguments = padded(module, call._replace(image=batch))
    is_padded = image is not batch
    image, weight, bias = _as_computed(image, weight, bias, dtype)
    return problem_of(image, weight, bias is not None, arguments), is_padded


def _as_computed(
    image: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return (image, weight, bias) if dtype is None else as_autocast(image, weight, bias, dtype)


def at_odds(module: Any, kind: Kind, problem: ConvProblem) -> tuple[str, str] | None:
    """Return in what a problem differs from a module's attributes: what it asks for, and what they say.

    None if in nothing. They differ where a class computes with a part of its filter, in a wider type or, for
    a while, with another dilation. The weight itself may be computed, so it is not read.
    """
    asked: dict[str, object] = {
        "weight": problem.filter_shape,
        "stride": problem.stride,
        "padding": problem.padding,
        "dilation": problem.dilation,
        "groups": problem.groups,
    }
    try:
        said = _traits(module, kind, problem.input_shape)
    except (AttributeError, TypeError) as error:
        return _listed(asked, asked), f"nothing that describes a convolution ({error})"
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    is_autocast = problem.itemsize == _AUTOCAST_ITEMSIZE and not dtypes.isdisjoint(_CAST_BY_AUTOCAST)
    if dtypes and problem.dtype not in dtypes and not is_autocast:
        asked["type"], said["type"] = problem.dtype, " and ".join(sorted(dtypes))
    odd = [name for name in asked if asked[name] != said[name]]
    return (_listed(asked, odd), _listed(said, odd)) if odd else None


def _traits(module: Any, kind: Kind, input_shape: tuple[int, ...]) -> dict[str, object]:
    """Return what a module's attributes say of its convolution of such an image."""
    first, second = module.out_channels, module.in_channels
    if kind.is_transposed:
        first, second = second, first
    weight = torch.empty((first, second // module.groups, *module.kernel_size), device="meta")
    image = torch.empty(input_shape, device="meta")
    _, own = padded(module, Call(image, weight, None, arguments_of(module), module.padding_mode))
    return {
        "weight": tuple(weight.shape),
        "stride": own.stride,
        "padding": own.padding,
        "dilation": own.dilation,
        "groups": own.groups,
    }


def _listed(traits: Mapping[str, object], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {traits[name]}" for name in names)
