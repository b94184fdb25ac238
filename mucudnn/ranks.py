"""One plan for all ranks of a distributed run: all see that they want the same, and the first one decides."""

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch.distributed as dist

from mucudnn.errors import BackendError, PlanMismatchError
from mucudnn.plan import ConvSite, Plan
from mucudnn.problem import ConvProblem
from mucudnn.profile import Environment

Result = TypeVar("Result")

_DECIDING = 0


def is_distributed() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclasses.dataclass(frozen=True)
class Picture:
    """What a rank has found before it tunes, for the others to see.

    Attributes:
        problems: what it computes; all ranks have to compute the same.
        environment: where it computes; a plan is of use only in the one in which it was made.
        asked: what plan it asks for: options by their names, as text.
    """

    problems: Mapping[ConvSite, ConvProblem]
    environment: Environment
    asked: Mapping[str, str]


def agreed(find: Callable[[], tuple[Picture, Callable[[], Plan]]]) -> Plan:
    """Return the plan for what is found; of several ranks, that of the first one, in all of them.

    All ranks of the default process group have to call this, at the same point of their programs: the others
    wait while the first one tunes. Set the group's timeout to as long as that may take. With NCCL, set the
    current device of every rank before.

    Args:
        find: finds what this rank computes, and what makes a plan of that, which only the first rank calls.
            Where it fails, all ranks raise.

    Raises:
        PlanMismatchError: some rank computes something else than the first, or elsewhere, or asks for another
            plan; all ranks raise it, before anything is tuned.
        MucudnnError: what finding has raised in some rank, or tuning in the first; all ranks raise the same.
    """
    if not is_distributed():
        _, make = find()
        return make()
    here, make = _together(find)
    objections: list[str | None] = [None] * dist.get_world_size()
    first = of_the_first(here)
    dist.all_gather_object(objections, _together(lambda: _objection(first, here)))
    said = [f"rank {rank} {reason}" for rank, reason in enumerate(objections) if reason is not None]
    if said:
        raise PlanMismatchError(f"All ranks must be able to run one plan, but {'; '.join(said)}.")
    return _decided(make)


def of_the_first(value: Result) -> Result:
    """Return what the first rank has; all ranks have to call this at the same point. Alone, it is `value`."""
    if not is_distributed():
        return value
    said = [value if dist.get_rank() == _DECIDING else None]
    dist.broadcast_object_list(said, _DECIDING)
    return cast(Result, said[0])


def _together(call: Callable[[], Result]) -> Result:
    """Return what a call returns in this rank; if it fails in any, all ranks raise."""
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  # it is raised when all ranks know of it
        failure = error
    failures: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else _portable(failure))
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            raise other from BackendError(f"Rank {rank} has raised it.")
    return result


def _decided(make: Callable[[], Plan]) -> Plan:
    """Return the first rank's plan, as it reads it itself: byte for byte the same for all."""
    plan = _together(lambda: make() if dist.get_rank() == _DECIDING else None)
    said = [None if plan is None else plan.to_text()]
    dist.broadcast_object_list(said, _DECIDING)
    return Plan.from_text(str(said[0]))


def _portable(error: Exception) -> Exception:
    """Return the error as other processes can have it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # its kind cannot be told
        return BackendError(str(error) or repr(error))
    return copy if isinstance(copy, type(error)) else BackendError(str(error))


def _objection(first: Picture, here: Picture) -> str | None:
    """Return in what this rank differs from the first one, or None if in nothing that matters."""
    for name in {**first.asked, **here.asked}:  # other releases may know other options
        if name not in here.asked or name not in first.asked:
            return f"is of another release: of it and rank {_DECIDING} only one knows the option {name!r}"
        if here.asked[name] != first.asked[name]:
            return f"asks for {name} {here.asked[name]}, where rank {_DECIDING} asks for {first.asked[name]}"
    for site in sorted({*first.problems, *here.problems}):
        if first.problems.get(site) != here.problems.get(site):
            there, computed = (each.problems.get(site, "nothing") for each in (first, here))
            return f"computes {computed} at {site}, where rank {_DECIDING} computes {there}"
    differences = first.environment.differences(here.environment)
    return f"has another environment: {'; '.join(differences)}" if differences else None
