"""What was decided: a division for every site of a model, as an exact, portable value."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mucudnn.choices import Mode, Policy
from mucudnn.division import Division
from mucudnn.errors import PlanError, PlanFormatError
from mucudnn.evidence import CallEvidence, Evidence, FrozenEvidence
from mucudnn.files import write_whole
from mucudnn.plan_file import decode, encode, parse
from mucudnn.problem import OPTIONAL, ConvOp, ConvProblem
from mucudnn.profile import Candidate, Environment
from mucudnn.sizes import format_bytes, format_exactly

SCHEMA = 7
"""Version of the plan file; a newer one is refused.

The first has no quotients of rounds and no calls, the second nothing of frozen graphs, the third nothing of
algorithms that are not deterministic, the fourth nothing of others who used the processors meanwhile, the
fifth does not tell transposed convolutions, the sixth not those of them that PyTorch computes otherwise. A
file has the lowest that holds it.
"""

_NAMED = 3
"""How many algorithms a plan names when it is printed itself."""


@dataclasses.dataclass(frozen=True, order=True)
class ConvSite:
    """Where a problem occurs in a model.

    Attributes:
        path: the module's path in the model, as in `named_modules`.
        op: which of its three convolutions.
        variant: 0 for the first shape that the module meets in a pass, 1 for the second, and so on.
    """

    path: str
    op: ConvOp
    variant: int = 0

    def __str__(self) -> str:
        return f"{self._module} {self.op}{self._shape}"

    @property
    def place(self) -> str:
        """The module and, from the second on, the shape, in words."""
        return f"{self._module}{self._shape}"

    @property
    def _module(self) -> str:
        return self.path or "the model itself"

    @property
    def _shape(self) -> str:
        return f" (shape {self.variant + 1})" if self.variant else ""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What one site runs, and what smaller batches may be made of.

    Attributes:
        site: where.
        problem: of the whole mini-batch.
        division: what runs.
        candidates: those that fit the site's limit; they serve every smaller batch without measuring.
        evidence: what was seen when the division ran; None if it was not timed.
    """

    site: ConvSite
    problem: ConvProblem
    division: Division
    candidates: tuple[Candidate, ...] = ()
    evidence: Evidence | None = None

    @property
    def seen(self) -> Evidence:
        """What was seen when the division ran; all of it None if it was not timed."""
        return self.evidence or Evidence()

    @property
    def is_kept(self) -> bool:
        """Whether the site runs as before: undivided, in the very times of PyTorch's own convolution."""
        chosen = self.seen.chosen
        return self.division.is_undivided and chosen is not None and chosen == self.seen.reference

    def check(self) -> None:
        """Verify that what runs here, now or of a smaller batch, is possible.

        Raises:
            PlanError: the parts do not add up to the batch, the problem is another op's, or an algorithm has
                several set-up times.
        """
        if self.division.batch != self.problem.batch:
            raise PlanError(
                f"The parts of {self.site} must add up to {self.problem.batch} samples, "
                f"but got {self.division.batch}."
            )
        if self.site.op is not self.problem.op:
            raise PlanError(f"The problem of {self.site} must be of that op, but got {self.problem}.")
        set_ups = {(each.algorithm, each.setup_s) for each in (*self.division.parts, *self.candidates)}
        if len(set_ups) != len(dict(set_ups)):
            raise PlanError(f"An algorithm of {self.site} must have one set-up time, but got several.")


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A division for every site of a model, with all that is needed to use and to judge it.

    Attributes:
        mode: whose the limit is.
        policy: which micro-batch sizes were tried.
        limit_bytes: the limit, inclusive.
        environment: where it was measured; it answers only for that.
        assignments: one for each site, in the order in which the model meets them.
        untouched: paths of what runs as before, each with the reason; of some there are assignments too.
        version: of the mucudnn that made it.
        max_error: the largest error against float64 that was allowed; None if only the backend's bound was.
        calls: of the convolutions that were timed once more as the model calls them, what that has shown.
        frozen: of those that change in inference, what they are in graphs that torch.compile freezes.
        transposed: paths of the transposed ones, of which dgrad is the forward pass.
    """

    mode: Mode
    policy: Policy
    limit_bytes: int
    environment: Environment
    assignments: tuple[Assignment, ...]
    untouched: tuple[tuple[str, str], ...] = ()
    version: str = ""
    max_error: float | None = None
    calls: tuple[CallEvidence, ...] = ()
    frozen: tuple[FrozenEvidence, ...] = ()
    transposed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        divided = sum(not assigned.division.is_undivided for assigned in self.assignments)
        algorithms = sorted({part.algorithm for each in self.sites.values() for part in each.parts})
        more = f" and {len(algorithms) - _NAMED} more" if len(algorithms) > _NAMED else ""
        return (
            f"<Plan for {len(self.assignments)} sites, {divided} of them in micro-batches, by "
            f"{', '.join(algorithms[:_NAMED])}{more}; {self.mode} of {format_bytes(self.limit_bytes)}; "
            "`mucudnn.report.render_plan` returns it as a table>"
        )

    @property
    def sites(self) -> Mapping[ConvSite, Division]:
        """The division of every site, in the order in which the model meets them."""
        return MappingProxyType({assigned.site: assigned.division for assigned in self.assignments})

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that the plan needs: the largest site's (reuse) or all sites' sum (sharing)."""
        workspaces = [assigned.division.workspace_bytes for assigned in self.assignments]
        return max(workspaces, default=0) if self.mode is Mode.REUSE else sum(workspaces)

    @property
    def time_s(self) -> float:
        """Seconds that the profiles predict for all sites together."""
        return math.fsum(assigned.division.time_s for assigned in self.assignments)

    @property
    def others(self) -> tuple[float, ...]:
        """How many processors others took while each of its times was measured; 0 where that moved nothing.

        One number for every division that was timed, then for every whole call, then for frozen graphs. What
        is the same was measured once, and counts once.
        """
        divisions = {
            (each.problem, each.division.key): each.seen.others
            for each in self.assignments
            if each.seen.chosen and not each.seen.is_predicted
        }
        calls = {(each.reference, each.divided): each.others for each in self.calls}
        frozen = {
            (each.times.reference, each.times.divided): each.times.others
            for each in self.frozen
            if each.times
        }
        return (*divisions.values(), *calls.values(), *frozen.values())

    def joined(self, others: Iterable["Plan"]) -> "Plan":
        """Return one plan of this one's sites and then of others', made likewise and in its environment."""
        plans = (self, *others)
        return dataclasses.replace(
            self,
            assignments=tuple(each for plan in plans for each in plan.assignments),
            untouched=tuple(each for plan in plans for each in plan.untouched),
            calls=tuple(each for plan in plans for each in plan.calls),
            frozen=tuple(each for plan in plans for each in plan.frozen),
            transposed=tuple(dict.fromkeys(path for plan in plans for path in plan.transposed)),
        )

    def check(self) -> None:
        """Verify in exact integers that every batch is covered and that the limit holds.

        Raises:
            PlanError: an assignment is impossible, a site stands twice, or the workspace exceeds the limit.
        """
        if len(self.sites) != len(self.assignments):
            raise PlanError("Every site must have one division, but some site stands twice.")
        for assigned in self.assignments:
            assigned.check()
        if self.workspace_bytes > self.limit_bytes:
            raise PlanError(
                f"The workspace must be at most {format_exactly(self.limit_bytes)}, "
                f"but the plan needs {format_exactly(self.workspace_bytes)}."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON to `path`, whole or not at all; through a link to what it names.

        What is no file, such as a pipe, is written to as it is.

        Raises:
            OSError: the file cannot be written; the error names `path`.
        """
        write_whole(path, self.to_text().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read the plan that `save` wrote to `path`, and check it.

        Raises:
            PlanFormatError: the file is no plan, is damaged, or has a newer schema.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_text(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise PlanFormatError(f"{path} is no plan: it is not a text.") from error
        except PlanError as error:
            raise PlanFormatError(f"{path} cannot be used: {error}") from error

    def to_text(self) -> str:
        """Return the plan as JSON text; equal plans give equal texts."""
        return json.dumps(encode(_File.of(self)), indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """Return the checked plan that `text` describes.

        Raises:
            PlanFormatError: the text is no plan, is damaged, or has a newer schema.
            PlanError: its numbers contradict one another.
        """
        fields = parse(text)
        if isinstance(fields, dict) and fields.get("report") is not None:
            raise PlanFormatError(
                "A plan must be what save or mucudnn tune -o writes, but got a report that --json prints, "
                f"of the kind {fields['report']!r}."
            )
        schema = fields.get("schema") if isinstance(fields, dict) else None
        if type(schema) is not int or schema < 1:  # true is no schema, though Python counts it as 1
            raise PlanFormatError("A plan must name its schema, but this text does not.")
        if schema > SCHEMA:
            raise PlanFormatError(
                f"A plan must have schema {SCHEMA} or lower, but got {schema}: it comes from a newer mucudnn."
            )
        try:
            file: _File = decode(_File, fields, "the plan")
            plan = file.plan()
        except ValueError as error:
            reason = str(error).removesuffix(".")
            raise PlanFormatError(
                f"A plan must be whole, but a field is missing or wrong: {reason}."
            ) from error
        plan.check()
        return plan


def _schema(plan: Plan) -> int:
    """Return the lowest schema that holds a plan."""
    if any(each.problem.is_apart for each in plan.assignments):
        return 7
    if plan.transposed:
        return 6
    if any(plan.others):
        return 5
    parts = (part for each in plan.assignments for part in (*each.division.parts, *each.candidates))
    if not all(part.is_deterministic for part in parts):
        return 4
    if plan.frozen:
        return 3
    has_speedups = any(each.seen.speedups for each in plan.assignments)
    return 2 if plan.calls or has_speedups else 1


@dataclasses.dataclass(frozen=True)
class _Row:
    """An assignment as it stands in the file."""

    path: str
    op: ConvOp
    variant: int
    problem: int
    division: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    evidence: Evidence | None

    def assignment(self, problems: tuple[ConvProblem, ...]) -> Assignment:
        if self.problem >= len(problems):
            raise ValueError(f"there must be a problem {self.problem}, but got {len(problems)} problems")
        site = ConvSite(self.path, self.op, self.variant)
        division = Division(self.division)
        return Assignment(site, problems[self.problem], division, self.candidates, self.evidence)


@dataclasses.dataclass(frozen=True)
class _File:
    """A plan as it stands in the file: a problem stands there once, however many sites have it."""

    schema: int
    version: str
    mode: Mode
    policy: Policy
    limit_bytes: int
    environment: Environment
    problems: tuple[ConvProblem, ...]
    assignments: tuple[_Row, ...]
    untouched: tuple[tuple[str, str], ...]
    max_error: float | None = dataclasses.field(default=None, metadata=OPTIONAL)
    calls: tuple[CallEvidence, ...] = dataclasses.field(default=(), metadata=OPTIONAL)
    frozen: tuple[FrozenEvidence, ...] = dataclasses.field(default=(), metadata=OPTIONAL)
    transposed: tuple[str, ...] = dataclasses.field(default=(), metadata=OPTIONAL)

    @classmethod
    def of(cls, plan: Plan) -> "_File":
        """Return what is written of `plan`: each problem once, the assignments with its place."""
        problems = tuple(dict.fromkeys(assigned.problem for assigned in plan.assignments))
        places = {problem: place for place, problem in enumerate(problems)}
        return cls(
            schema=_schema(plan),
            problems=problems,
            assignments=tuple(
                _Row(
                    path=assigned.site.path,
                    op=assigned.site.op,
                    variant=assigned.site.variant,
                    problem=places[assigned.problem],
                    division=assigned.division.parts,
                    candidates=assigned.candidates,
                    evidence=assigned.evidence,
                )
                for assigned in plan.assignments
            ),
            **_unchanged(plan),
        )

    def plan(self) -> Plan:
        """Return the plan of which this was written, unchecked.

        Raises:
            ValueError: an assignment names a problem that is not there.
        """
        assignments = tuple(row.assignment(self.problems) for row in self.assignments)
        return Plan(assignments=assignments, **_unchanged(self))


def _unchanged(whose: Plan | _File) -> dict[str, Any]:
    """Return what a plan and its file have alike, all but the assignments."""
    names = (field.name for field in dataclasses.fields(Plan) if field.name != "assignments")
    return {name: getattr(whose, name) for name in names}
