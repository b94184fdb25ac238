"""The comparison of public models with their twins, on a model of our own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.commit import commit
from bench.models import compare as comparison
from bench.models.__main__ import main
from bench.models.compare import Found, compare
from bench.models.zoo import Entry
from mucudnn.errors import UntunedWarning
from tests.models import a_chain

pytestmark = pytest.mark.usefixtures("one_thread")

ENTRY = Entry("ours", "chain", a_chain, (3, 6, 6))


def found(**changes: Any) -> Found:
    values = {"in_float64": 0.0, "in_float32": 2e-7, "perturbed": (1e-7, 3e-7)}
    return Found(ENTRY, ("Conv2d",), 2, 6, 6, 0, **{**values, **changes})


def test_a_divided_model_equals_its_twin_and_drifts_no_farther_than_perturbed_ones() -> None:
    result = compare(ENTRY, steps=3, twins=20)

    assert (result.convolutions, result.sites, result.divided, result.left) == (2, 5, 5, 0)
    assert result.kinds == ("Conv2d",)
    assert result.is_equal
    assert len(result.perturbed) == 20
    assert min(result.perturbed) > 0
    assert result.is_within


def test_a_model_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(model: nn.Module, plan: object) -> nn.Module:
        with torch.no_grad():
            next(model.parameters()).mul_(1.001)
        return model

    monkeypatch.setattr(comparison, "apply", disturbed)
    result = compare(ENTRY, steps=3, twins=4)

    assert not result.is_equal
    assert not result.is_within
    assert result.farther == 0


class _Growing(nn.Module):
    """Takes more samples at every call, and so more than were tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = a_chain()
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return self.chain(images.repeat(1 + self.calls, 1, 1, 1))


def test_what_runs_as_before_is_no_success() -> None:
    with pytest.raises(UntunedWarning):
        compare(Entry("ours", "growing", _Growing, (3, 6, 6)), steps=2, twins=1)


@pytest.mark.parametrize(
    ("changes", "is_equal", "is_within"),
    [
        ({}, True, True),
        ({"in_float64": 1.1e-8}, False, True),
        ({"in_float32": 3e-7}, True, True),
        ({"in_float32": 4e-7}, True, False),
        ({"in_float32": float("inf"), "perturbed": (float("inf"),)}, True, False),
    ],
)
def test_verdicts(changes: dict[str, Any], is_equal: bool, is_within: bool) -> None:
    result = found(**changes)

    assert (result.is_equal, result.is_within) == (is_equal, is_within)


class _Undefined(nn.Module):
    """Computes what is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = a_chain()

    def forward(self, images: Tensor) -> Tensor:
        return self.chain(images) * float("nan")


def test_what_is_no_number_equals_nothing() -> None:
    result = compare(Entry("ours", "undefined", _Undefined, (3, 6, 6)), steps=1, twins=1)

    assert not result.is_equal
    assert not result.is_within


def test_models_start_alike() -> None:
    one, other = (compare(ENTRY, steps=2, twins=1) for _ in range(2))

    assert one == other


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0

    names = capsys.readouterr().out.splitlines()
    assert "monai UNet 3-D" in names
    assert len(names) == len({*names}) == 45


def test_a_pattern_without_a_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--only", "monai *", "resnet"])

    assert stopped.value.code == 2
    assert (
        "--only must match one of the names that --list prints, but got 'resnet'." in capsys.readouterr().err
    )


def test_a_number_of_twins_is_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--twins", "0"])

    assert stopped.value.code == 2
    assert "must be at least 1, but got 0" in capsys.readouterr().err


@pytest.mark.parametrize(("in_float64", "status"), [(0.0, 0), (1e-3, 1)])
def test_the_table_tells_each_model_and_how_many_hold(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
    in_float64: float,
    status: int,
) -> None:
    monkeypatch.setattr("bench.models.__main__.compare", lambda *_: found(in_float64=in_float64))
    output = tmp_path / "models.md"

    assert main(["--only", "transformers RegNet", "--twins", "2", "--output", str(output)]) == status

    text = output.read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert text.startswith(f"{1 - status} of 1 models equal their twins to 1e-08 in float64, after 3 steps")
    assert "in float32 1 end within the spread of 2 twins" in text
    assert f"\ncommit {commit()}, 20" in text
    assert ("DIFFERENT" in text) == bool(status)
