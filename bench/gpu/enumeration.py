"""Whether a description of the card lists what the card itself lists, and its plans run."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.gpu.device import Fact, shipped_for
from bench.gpu.driverless import Listed, driverless
from bench.gpu.ground import described_backend
from bench.gpu.layers import Case, all_cases
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.values import Answer
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.configurations import EngineConfiguration
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvProblem
from mucudnn.profile import Trial

Configurations = Sequence[EngineConfiguration | Listed]
Lister = Callable[[ConvProblem], Configurations | None]


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
    """Lists by the card itself, by cuDNN's description of it, there and without a driver, by the shipped one.

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
        driverless: pairs by that description where there is no driver; None if that could not be seen.
        common_driverless: pairs of them that the card itself lists.
        differing_driverless: of those, the ones that declare another workspace.
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
    driverless: int | None
    common_driverless: int | None
    differing_driverless: int | None
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


def missing(found: Configurations, where: Configurations) -> list[EngineConfiguration | Listed]:
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
    cases = [*all_cases(task.layers)]
    with (
        ground.precision(allow_tf32=True),
        driverless(description, ground.card.rules, [case.problem for case in cases]) as elsewhere,
    ):
        rules, live = ground.card.rules, ground.enumerator()
        listers: dict[str, Lister] = {
            "description": Enumerator(ground.library, description, rules).listed,
            "no driver": lambda _: attempted(ground, elsewhere.listed)[0],
        }
        if shipped is not None:
            listers["shipped"] = Enumerator(ground.library, shipped, rules).listed
        backend = described_backend(ground, description)
        for case in cases:
            if task.deadline.is_over:
                yield Cut(f"{case.layer}, {case.problem.op}, {case.setting} and what follows")
                return
            found = {name: lister(case.problem) for name, lister in listers.items()}
            lists = {name: each for name, each in found.items() if each is not None}
            error, failure = attempted(ground, functools.partial(_described_error, backend, case))
            own = live.listed(case.problem)
            yield _list_row(case, own, lists, error, failure)
            for name, other in lists.items():
                yield from _only_rows(case, own, other, name)


def _list_row(
    case: Case,
    live: Configurations,
    lists: Mapping[str, Configurations],
    error: float | None,
    failure: str | None,
) -> ListRow:
    overlaps = {name: overlap(live, other) for name, other in lists.items()}
    described = overlaps["description"]
    without, shipped = (_numbers(overlaps.get(name)) for name in ("no driver", "shipped"))
    return ListRow(
        layer=case.layer,
        op=case.problem.op,
        setting=case.setting,
        batch=case.problem.batch,
        live=len(live),
        described=described.listed,
        common=described.common,
        differing=described.differing,
        is_equal=described.is_equal,
        driverless=without[0],
        common_driverless=without[1],
        differing_driverless=without[2],
        shipped=shipped[0],
        common_shipped=shipped[1],
        differing_shipped=shipped[2],
        error=error,
        failure=failure,
    )


def _numbers(found: Overlap | None) -> tuple[int | None, int | None, int | None]:
    return (None, None, None) if found is None else (found.listed, found.common, found.differing)


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
    if any(row.driverless is not None for row in lists):
        found, common = (
            sum(row.driverless or 0 for row in lists),
            sum(row.common_driverless or 0 for row in lists),
        )
        differing = sum(row.differing_driverless or 0 for row in lists)
        yield Answer(
            "And by that description where there is no driver?",
            f"{common} of {live} pairs are common, {differing} of them with another workspace; "
            f"{found - common} are listed there alone",
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
