"""The table of what cuDNN 9.19 offers an H200: how a line is made anew, and how the kept ones are read."""

import dataclasses
import gzip
import json
from collections.abc import Mapping
from pathlib import Path

from bench.gpu.layers import DTYPES, LAYERS
from mucudnn.backends.cudnn.configurations import Knobs, Rules, Source, id_of, parse_id
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.graph import operation_graph
from mucudnn.backends.cudnn.library import Library
from mucudnn.backends.cudnn.offers import Offers
from mucudnn.backends.cudnn.pruning import prune
from mucudnn.problem import ConvProblem
from tests.cudnn.problems import problems_of

PATH = Path(__file__).parent.parent / "data" / "cudnn_9_19_h200.json.gz"


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration that pruning by the workspace with beta 0 keeps; no beta 1 is None."""

    rank: int
    source: Source
    engine: int
    knobs: Knobs
    workspace_bytes: int
    beta_1_bytes: int | None
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is offered for one problem: how many configurations, and those that are kept."""

    listed: int
    rows: tuple[Row, ...]


def case_of(library: Library, device: Descriptor, problem: ConvProblem) -> Case:
    """Return what cuDNN offers now."""
    overwriting, accumulating = (
        Offers(library, device, operation_graph(library, problem, accumulate)).listed()
        for accumulate in (False, True)
    )
    beta_1 = {(offer.engine, offer.knobs): offer.workspace_bytes for offer in accumulating}
    permitted = [offer for offer in overwriting if Rules().permits(offer.notes, problem.dtype)]
    ranks = {(offer.engine, offer.knobs): rank for rank, offer in enumerate(permitted)}
    rows = tuple(
        Row(
            rank=ranks[offer.engine, offer.knobs],
            source=offer.source,
            engine=offer.engine,
            knobs=offer.knobs,
            workspace_bytes=offer.workspace_bytes,
            beta_1_bytes=beta_1.get((offer.engine, offer.knobs)),
            notes=offer.notes,
        )
        for offer in prune(permitted)
    )
    return Case(len(permitted), rows)


def all_problems() -> list[ConvProblem]:
    """Return the problems of the table, in its order."""
    return [problem for layer in LAYERS.values() for dtype in DTYPES for problem in problems_of(layer, dtype)]


def line_of(problem: ConvProblem, case: Case) -> str:
    """Return a case as a line of JSON: the problem's key, the number listed, the rows."""
    rows = [
        [
            row.rank,
            row.source,
            id_of(row.engine, row.knobs),
            row.workspace_bytes,
            row.beta_1_bytes,
            "|".join(row.notes),
        ]
        for row in case.rows
    ]
    return json.dumps([problem.key, case.listed, rows], separators=(",", ":"))


def read_table() -> Mapping[str, Case]:
    """Return the kept cases by their problem's key."""
    lines = gzip.decompress(PATH.read_bytes()).decode().splitlines()
    return {_key(text): Case(listed, tuple(map(_row, rows))) for text, listed, rows in map(json.loads, lines)}


def _key(text: str) -> str:
    """Return the key of a problem by what it was when the table was made."""
    return ConvProblem.from_json(json.loads(text)).key


def _row(fields: list[object]) -> Row:
    rank, source, algorithm, workspace_bytes, beta_1_bytes, notes = fields
    engine, knobs = parse_id(algorithm)
    return Row(
        rank,
        Source(source),
        engine,
        knobs,
        workspace_bytes,
        beta_1_bytes,
        tuple(notes.split("|")) if notes else (),
    )
