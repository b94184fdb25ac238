"""Whether a description of the card lists what the card itself lists, and its plans run."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from bench.gpu.device import Fact, shipped_for
from bench.gpu.ground import described_backend
from bench.gpu.layers import Case, all_cases
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.values import Answer
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.configurations import EngineConfiguration
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.profile import Trial
from mucudnn.stand import Stand

Configurations = Sequence[EngineConfiguration]


_READ = "Can the card's own description be read?"


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What two lists have in common; pairs are an engine and its knobs.

    Attributes:
        listed: pairs in the list that is compared with the card's.
        common: pairs in both.
        differing: common pairs that declare another workspace.
        is_equal: whether the lists are equal, order included.
    """

    listed: int
    common: int
    differing: int
    is_equal: bool


@dataclasses.dataclass(frozen=True)
class ListRow:
    """Lists by the card itself, by cuDNN's description of it, and by the shipped description.

    Attributes:
        layer: name of the layer.
        op: which of the three.
        setting: type and layout.
        batch: samples.
        live: pairs that the card itself lists.
        described: pairs by cuDNN's description of the card.
        common: pairs in both.
        differing: common pairs that declare another workspace.
        is_equal: whether both lists are equal, order included.
        shipped: pairs by the shipped description; None without one.
        common_shipped: pairs of it that the card itself lists.
        differing_shipped: of those, the ones that declare another workspace.
        error: of the first plan made from the description without a handle, on a small batch, relative to
            float64.
        failure: why that plan did not run.
    """

    layer: str
    op: str
    setting: str
    batch: int
    live: int
    described: int
    common: int
    differing: int
    is_equal: bool
    shipped: int | None
    common_shipped: int | None
    differing_shipped: int | None
    error: float | None
    failure: str | None


@dataclasses.dataclass(frozen=True)
class OnlyRow:
    """Pairs of an engine and its knobs that one list has and the other has not."""

    layer: str
    op: str
    setting: str
    only_in: str
    missing_in: str
    algorithm: str
    workspace_bytes: int
    notes: tuple[str, ...]


def overlap(live: Configurations, other: Configurations) -> Overlap:
    """Return what another list has in common with the card's."""
    ours = {each.id: each.workspace_bytes for each in live}
    theirs = {each.id: each.workspace_bytes for each in other}
    common = ours.keys() & theirs.keys()
    differing = sum(ours[pair] != theirs[pair] for pair in common)
    return Overlap(len(other), len(common), differing, [*ours.items()] == [*theirs.items()])


def missing(found: Configurations, where: Configurations) -> list[EngineConfiguration]:
    """Return those of one list that the other has not."""
    others = {each.id for each in where}
    return [each for each in found if each.id not in others]


def rows(task: Task) -> Iterator[object]:
    """Yield the lists of every layer, op, type and layout, as long as there is time."""
    ground = task.ground
    shipped = shipped_for(ground.name)
    told, _ = attempted(ground, ground.description)
    description = told or shipped
    if told is None:  # why it cannot be read stands with the device's facts
        yield Fact(_READ, "no" if shipped is None else "no, and the shipped one stands for it")
    if description is None:
        return
    with ground.precision(allow_tf32=True):
        rules = ground.card.rules
        live = ground.enumerator()
        by_description = Enumerator(ground.library, description, rules)
        by_shipped = None if shipped is None else Enumerator(ground.library, shipped, rules)
        backend = described_backend(ground, description)
        for case in all_cases(task.layers):
            if task.deadline.is_over:
                yield Cut(f"{case.layer}, {case.problem.op}, {case.setting} and what follows")
                return
            lists = {
                "the card": live.listed(case.problem),
                "description": by_description.listed(case.problem),
            }
            if by_shipped is not None:
                lists["shipped"] = by_shipped.listed(case.problem)
            error, failure = attempted(ground, functools.partial(_described_error, backend, case))
            yield _list_row(
                case, lists["the card"], lists["description"], lists.get("shipped"), error, failure
            )
            for name, other in [*lists.items()][1:]:
                yield from _only_rows(case, lists["the card"], other, name)


def _list_row(
    case: Case,
    live: Configurations,
    described: Configurations,
    shipped: Configurations | None,
    error: float | None,
    failure: str | None,
) -> ListRow:
    by_description = overlap(live, described)
    by_shipped = None if shipped is None else overlap(live, shipped)
    return ListRow(
        layer=case.layer,
        op=case.problem.op,
        setting=case.setting,
        batch=case.problem.batch,
        live=len(live),
        described=by_description.listed,
        common=by_description.common,
        differing=by_description.differing,
        is_equal=by_description.is_equal,
        shipped=None if by_shipped is None else by_shipped.listed,
        common_shipped=None if by_shipped is None else by_shipped.common,
        differing_shipped=None if by_shipped is None else by_shipped.differing,
        error=error,
        failure=failure,
    )


def _only_rows(case: Case, live: Configurations, other: Configurations, name: str) -> Iterator[OnlyRow]:
    for found, where, names in (
        (live, other, ("the card", name)),
        (other, live, (name, "the card")),
    ):
        for each in missing(found, where):
            yield OnlyRow(
                case.layer, case.problem.op, case.setting, *names, each.id, each.workspace_bytes, each.notes
            )


def _described_error(backend: CudnnBackend, case: Case) -> float:
    """Run the first plan that the description lists for two samples, or one of three dimensions."""
    batch = 2 if len(case.problem.input_size) == 2 else 1
    problem = case.problem.with_batch(batch)
    algorithm = backend.algorithms(problem)[1]
    stand = Stand(backend, problem, backend.buffer_bytes(problem, algorithm))
    return stand.run(Trial(problem, algorithm, whole=True)).error()


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield whether descriptions list what the card lists, and whether their plans run."""
    for fact in only(Fact, rows):
        yield Answer(fact.name, fact.value)
    lists = only(ListRow, rows)
    equal = sum(row.is_equal for row in lists)
    live, common = sum(row.live for row in lists), sum(row.common for row in lists)
    differing = sum(row.differing for row in lists)
    yield Answer(
        "Does cuDNN list the same by its description of the card?",
        f"{equal} of {len(lists)} lists are equal; {common} of {live} pairs are common, "
        f"{differing} of them with another workspace",
    )
    if any(row.shipped is not None for row in lists):
        common = sum(row.common_shipped or 0 for row in lists)
        differing = sum(row.differing_shipped or 0 for row in lists)
        yield Answer(
            "And by the shipped description?",
            f"{common} of {live} pairs are common, {differing} of them with another workspace",
        )
    ran = [row.error for row in lists if row.error is not None]
    yield Answer(
        "Does a plan run that is made from a description?",
        f"{len(ran)} of {len(lists)} ran, largest error {max(ran, default=0.0):.1e}",
    )
