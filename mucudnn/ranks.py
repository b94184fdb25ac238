"""One plan for all ranks of a distributed run: the first one decides, and all see that it suits them."""

from collections.abc import Callable, Mapping

import torch.distributed as dist

from mucudnn.errors import BackendError, PlanMismatchError
from mucudnn.plan import ConvSite, Plan
from mucudnn.problem import ConvProblem
from mucudnn.profile import Environment

_DECIDING = 0


def is_distributed() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(
    problems: Mapping[ConvSite, ConvProblem], environment: Environment, make: Callable[[], Plan]
) -> Plan:
    """Return the plan that `make` makes; of several ranks, that of the first one, in all of them.

    All ranks of the default process group have to call this, at the same point of their programs: the others
    wait while the first one tunes. Set the group's timeout to as long as that may take.

    Args:
        problems: what this rank computes; all have to compute the same.
        environment: where this rank computes; a plan is of use in the one in which it was made only.
        make: tunes; only the first rank calls it.

    Raises:
        BackendError: the first rank could not tune.
        PlanMismatchError: some rank computes something else, or elsewhere; all ranks raise it.
    """
    if not is_distributed():
        return make()
    plan = _decided(make)
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, _objection(plan, problems, environment))
    objections = [f"rank {rank} {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if objections:
        raise PlanMismatchError(f"All ranks must be able to run one plan, but {'; '.join(objections)}.")
    return plan


def _decided(make: Callable[[], Plan]) -> Plan:
    """Return the first rank's plan, as it reads it itself: byte for byte the same for all."""
    said: list[tuple[bool, str]] = [(False, "")]
    if dist.get_rank() == _DECIDING:
        try:
            said = [(True, make().to_text())]
        except BaseException as error:
            dist.broadcast_object_list([(False, str(error) or repr(error))], _DECIDING)
            raise
    dist.broadcast_object_list(said, _DECIDING)
    is_made, text = said[0]
    if not is_made:
        raise BackendError(f"Rank {_DECIDING} tunes for all, but it could not: {text}")
    return Plan.from_text(text)


def _objection(plan: Plan, problems: Mapping[ConvSite, ConvProblem], environment: Environment) -> str | None:
    """Return why this rank cannot run the plan, or None if it can."""
    planned = {assigned.site: assigned.problem for assigned in plan.assignments}
    for site in sorted({*planned, *problems}):
        if planned.get(site) != problems.get(site):
            there, here = planned.get(site, "nothing"), problems.get(site, "nothing")
            return f"computes {here} at {site}, where rank {_DECIDING} computes {there}"
    differences = plan.environment.differences(environment)
    return f"has another environment: {'; '.join(differences)}" if differences else None
