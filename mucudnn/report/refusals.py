"""What was refused when a plan was made, and why: a store tells that, a plan does not hold it."""

import collections
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from mucudnn.choices import Mode
from mucudnn.errors import StoreError
from mucudnn.plan import ConvSite, Plan
from mucudnn.problem import ConvProblem
from mucudnn.profile import Record, Refusal, RefusalKind
from mucudnn.profiling.trials import is_settled, judged
from mucudnn.report.words import DEFAULT_WIDTH, describe_shape
from mucudnn.sizes import format_exactly
from mucudnn.store import SqliteStore

_UNKNOWN = "Not known to this store."
_TITLE = "Refused when the plan was made: algorithms, or divisions as a whole, with the samples of a part."


def refusals_of(plan: Plan, store: SqliteStore) -> dict[ConvProblem, list[Refusal] | None]:
    """Return what `store` holds against algorithms and divisions, for each problem of `plan`.

    What was measured and is larger or less exact than the plan allows counts as well. Refusals for size under
    a smaller limit than the plan's say nothing of it and are left out, but for divisions in sharing mode,
    whose sites have less room than the limit of all. None stands for a problem of which the store knows
    nothing.

    Raises:
        StoreError: the plan was not made from this store, or the store cannot be read.
    """
    problems = dict.fromkeys(assigned.problem for assigned in plan.assignments)
    records = {problem: [*_records_of(plan, problem, store)] for problem in problems}
    if not any(records.values()):
        raise StoreError(
            f"{store.path} must hold what the plan was made from, but has nothing of its convolutions in its "
            "environment. For a plan from a recording name that: --store replay:NAME."
        )
    return {problem: [*_refusals(plan, found)] if found else None for problem, found in records.items()}


def _refusals(plan: Plan, records: Iterable[Record]) -> Iterator[Refusal]:
    for record in records:
        trial = record.trial
        found = judged(record, plan.max_error).refusal
        if found is None and record.workspace_bytes is not None and record.workspace_bytes > plan.limit_bytes:
            needed, limit = map(format_exactly, (record.workspace_bytes, plan.limit_bytes))
            reason = f"it needs {needed}, the limit is {limit}"
            yield Refusal(trial.algorithm, trial.problem.batch, RefusalKind.OVER_LIMIT, reason)
        elif found is not None and (is_settled(record, plan.limit_bytes) or _is_of_room(plan, record)):
            yield found


def _is_of_room(plan: Plan, record: Record) -> bool:
    """Whether a division as a whole was refused for what a site had of the limit of all."""
    return plan.mode is Mode.SHARING and record.trial.is_composed


def _records_of(plan: Plan, problem: ConvProblem, store: SqliteStore) -> Iterator[Record]:
    """Yield the records of a problem as a whole, and of its parts as parts."""
    for size in plan.policy.sizes(problem.batch):
        for record in store.records_of(plan.environment, problem.part(size)):
            if record.trial.whole == (size == problem.batch):
                yield record


def render_refusals(
    plan: Plan, refusals: Mapping[ConvProblem, list[Refusal] | None], width: int = DEFAULT_WIDTH
) -> str:
    """Return what `refusals_of` found for people to read, each problem once with all its sites.

    Args:
        plan: that was asked about.
        refusals: of its problems.
        width: columns that lines may take.
    """
    sites_of: dict[ConvProblem, list[ConvSite]] = collections.defaultdict(list)
    for assigned in plan.assignments:
        sites_of[assigned.problem].append(assigned.site)
    lines = _wrapped(_TITLE, "", width)
    without = sum(refused == [] for refused in refusals.values())
    if without:
        some = f" for {without} of {len(refusals)} problems" if without < len(refusals) else ""
        lines += ["", f"Nothing{some}."]
    for problem, refused in refusals.items():
        if refused == []:
            continue
        sites = sites_of[problem]
        shape = describe_shape(problem, all(site.path in plan.transposed for site in sites))
        lines += ["", *_wrapped(f"{', '.join(map(str, sites))}  {shape}", "", width)]
        for line in [_UNKNOWN] if refused is None else _alike(refused):
            lines += _wrapped(line, "  ", width)
    return "\n".join(lines)


def refusals_as_json(plan: Plan, refusals: Mapping[ConvProblem, list[Refusal] | None]) -> dict[str, object]:
    """Return what `refusals_of` found as JSON values: refusals site by site, and sites that are not known."""
    known = [each for each in plan.assignments if refusals[each.problem] is not None]
    unknown = [each for each in plan.assignments if refusals[each.problem] is None]
    return {
        "refusals": [
            {
                **_place_as_json(assigned.site),
                "algorithm": refusal.algorithm,
                "batch": refusal.batch,
                "kind": refusal.kind,
                "reason": refusal.reason,
            }
            for assigned in known
            for refusal in refusals[assigned.problem] or ()
        ],
        "not_known": [_place_as_json(assigned.site) for assigned in unknown],
    }


def _place_as_json(site: ConvSite) -> dict[str, object]:
    return {"path": site.path, "op": site.op, "variant": site.variant}


def _alike(refusals: list[Refusal]) -> list[str]:
    """Return a text for all refusals of one algorithm that have the same reason."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in sorted(refusals, key=lambda each: (each.algorithm, each.batch)):
        alike.setdefault((each.algorithm, each.kind, each.reason), []).append(str(each.batch))
    return [
        f"{algorithm}, {', '.join(batches)}: {kind}, {reason.removesuffix('.')}."
        for (algorithm, kind, reason), batches in alike.items()
    ]


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
