"""What a model is called with when it is examined, and what is said of one that does not run on it."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn
from torch.utils._pytree import tree_leaves

from mucudnn.errors import SampleError


@dataclasses.dataclass(frozen=True, eq=False)
class CallArguments:
    """A sample of both kinds of arguments.

    Attributes:
        args: by position.
        kwargs: by keyword.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, sample: object) -> "CallArguments":
        """Return the arguments that a sample stands for: a tensor, a tuple, a dict, or both kinds.

        Raises:
            SampleError: it is text or an array, which no model computes with, or holds an iterator, which
                could not be passed again.
        """
        found = cls._of(sample)
        for each in tree_leaves((found.args, found.kwargs)):
            if isinstance(each, Iterator):
                raise SampleError(
                    "A sample must be usable more than once, but it holds an iterator, which one pass uses "
                    f"up: a {type(each).__name__}."
                )
        return found

    @classmethod
    def _of(cls, sample: object) -> "CallArguments":
        if isinstance(sample, str | bytes | np.ndarray):
            raise SampleError(
                "A sample must be a tensor, a tuple of arguments or a dict of keyword arguments, but got "
                f"{type(sample).__name__}."
            )
        if isinstance(sample, CallArguments):
            return sample
        if isinstance(sample, Mapping):
            return cls((), dict(sample))
        if isinstance(sample, tuple | list):
            return cls(tuple(sample), {})
        return cls((sample,), {})


def rejected(model: nn.Module, sample: CallArguments, error: Exception) -> SampleError:
    """Return what to say of a model that raised `error` on the sample."""
    told = f"The model must run on the sample, but it raised {error!r}."
    count = len(sample.args)
    if sample.kwargs and not count and isinstance(error, TypeError) and not _takes(model, sample):
        return SampleError(
            f"{told} It was called with arguments by name, because a dict of a sample is these: give a dict "
            "that is one argument as ({...},)."
        )
    if count < 2 or not isinstance(error, TypeError):
        return SampleError(told)
    labels = "" if _takes(model, sample) else "leave out labels, and "
    return SampleError(
        f"{told} It was called with {count} arguments, because a tuple or list of a sample is its "
        f"arguments: {labels}give a list that is one argument as ([a, b],)."
    )


def _takes(model: nn.Module, sample: CallArguments) -> bool:
    """Return whether the model's `forward` names places for as many arguments."""
    try:
        signature = inspect.signature(model.forward)
        signature.bind(*sample.args, **sample.kwargs)
    except (TypeError, ValueError):  # it has not, or tells of none
        return False
    kinds = {each.kind for each in signature.parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL not in kinds  # else it is a wrapper's, which takes any
