"""cuDNN's engines in every type, layout and shape that models have, on a card and on a card on paper."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bench.gpu.ground import CardGround, Ground
from mucudnn.backends.cudnn.library import load_library
from tests.cudnn.grid import (
    CELLS,
    FEW,
    Cell,
    Results,
    assert_right,
    divided,
    operands_for,
    results_of,
)
from tests.paper_ground import PaperGround

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    scope="module",  # every backend makes handles of its own, and none is ever destroyed
    params=[
        pytest.param(CardGround, marks=pytest.mark.gpu, id="card"),
        pytest.param(lambda: PaperGround(load_library()), marks=pytest.mark.deviceless, id="paper"),
    ],
)
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    made = request.param()
    with made.current():
        yield made


def packed(results: Results) -> Tensor:
    return torch.cat([result.flatten() for result in results])


def unpacked(values: Tensor, like: Results) -> Results:
    pieces = values.split([result.numel() for result in like])
    return tuple(piece.view(result.shape) for piece, result in zip(pieces, like, strict=True))


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_both_passes_are_captured_in_a_graph_and_replayed_on_new_values(ground: Ground, cell: Cell) -> None:
    given = operands_for(cell.problem, ground.card.device)
    with ground.precision(cell.allow_tf32):
        layer = divided(ground.backend, cell.problem)
        warm = results_of(layer, given)  # makes the handles of both threads, and builds the plans
        ground.card.clock()
        replay, values = ground.captured(lambda: packed(results_of(layer, given)))

        given.renewed()
        values.fill_(float("nan"))
        replay()
        ground.card.clock()

        assert_right(ground.backend, cell.problem, given, unpacked(values, warm))


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_uneven_parts_are_right_on_a_side_stream(ground: Ground, cell: Cell) -> None:
    given = operands_for(cell.problem, ground.card.device)
    with ground.precision(cell.allow_tf32):
        layer = divided(ground.backend, cell.problem)
        with ground.side_stream():
            results = results_of(layer, given)

        assert_right(ground.backend, cell.problem, given, results)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_uneven_parts_of_an_engine_are_right_with_their_gradients(ground: Ground, cell: Cell) -> None:
    given = operands_for(cell.problem, ground.card.device)
    with ground.precision(cell.allow_tf32):
        results = results_of(divided(ground.backend, cell.problem), given)

        assert_right(ground.backend, cell.problem, given, results)
