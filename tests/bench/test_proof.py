"""What `make proof` concludes from losses, and what it keeps; the losses here are made up."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from torch import nn

from bench import proof as program
from bench.commit import commit
from bench.data import Digits, load
from bench.differences import largest
from bench.endings import INTERRUPTED
from bench.networks import conv_norm
from bench.proof_results import Epochs, Exact, Learnt, Near, Pair, Proof, figure
from mucudnn.plan_file import decode
from tests.examples import a_plan
from tests.figures import titles
from tests.plans import a_plan_for

EXACT = Exact((2.0, 1.0), (2.0, 1.0 + 1e-9))
NEAR = Near((2.0, 1.0), (2.0, 1.001), ((2.0, 1.002), (2.0, 0.9995)))


def pair(seed: int, accuracy: float, divided: float) -> Pair:
    return Pair(seed, Learnt((2.0, 0.5), accuracy, 60.0), Learnt((2.0, 0.4), divided, 45.0))


EPOCHS = Epochs(2, 300, (pair(0, 0.90, 0.903), pair(1, 0.95, 0.955), pair(2, 0.92, 0.911)))


def test_in_float64_losses_agree_to_the_bound_or_not() -> None:
    assert EXACT.holds
    assert not Exact((2.0,), (2.0 + 3e-8,)).holds
    assert [*EXACT.told()] == ["float64, 2 steps: losses differ by at most 1.0e-09, bound 1e-08"]


def test_in_float32_a_run_lies_within_the_spread_of_perturbed_runs() -> None:
    assert NEAR.holds
    assert NEAR.spreads == pytest.approx([0, 0.002])
    assert NEAR.excess == pytest.approx(0.8)
    assert NEAR.excesses == pytest.approx([0.4, 1.6])
    assert "1.6, 1 of 2 as far or further" in [*NEAR.told()][-1]
    outside = dataclasses.replace(NEAR, divided=(2.0, 1.003))
    assert not outside.holds
    assert [*outside.told()][-2] == "  within the spread at 1 of 2 steps"
    assert not dataclasses.replace(NEAR, divided=(2.1, 1.0)).holds  # where no other is off


def test_the_furthest_at_one_step_is_no_further_off_than_the_furthest_at_another() -> None:
    perturbed = ((2.3, 1.1), (2.1, 1.1), (2.1, 1.1))

    assert Near((2.0, 1.0), (2.0, 1.2), perturbed).holds
    assert not Near((2.0, 1.0), (2.0, 1.4), perturbed).holds


def test_accuracies_are_the_same_if_each_pair_is_within_one_percent() -> None:
    assert EPOCHS.holds
    assert EPOCHS.worst == pytest.approx(0.009)
    for one, other in ((0.90, 0.92), (0.92, 0.90)):
        assert not dataclasses.replace(EPOCHS, pairs=(*EPOCHS.pairs, pair(3, one, other))).holds


def test_what_is_no_number_never_holds() -> None:
    nan = float("nan")
    assert not Exact((2.0, 1.0), (2.0, nan)).holds
    assert not dataclasses.replace(NEAR, divided=(2.0, nan)).holds
    assert not dataclasses.replace(NEAR, divided=(2.0, 1.1), perturbed=((2.0, nan), *NEAR.perturbed)).holds
    one = EPOCHS.pairs[0]
    sick = dataclasses.replace(one, divided=dataclasses.replace(one.divided, losses=(2.0, nan)))
    assert not dataclasses.replace(EPOCHS, pairs=(sick, *EPOCHS.pairs[1:])).holds
    assert largest([0.0, nan]) == largest([0.0, float("inf")]) == float("inf")


def test_without_a_plan_the_program_says_what_writes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["proof", "--plan", str(tmp_path / "plan.json")])
    assert program.main() == 1
    told = capsys.readouterr().err
    assert told == f"mucudnn: there must be a plan in {tmp_path / 'plan.json'}, as make run writes it.\n"


def test_an_interrupt_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    a_plan().save(tmp_path / "plan.json")
    monkeypatch.setattr(program, "_proven", interrupted)
    monkeypatch.setattr(sys, "argv", ["proof", "--plan", str(tmp_path / "plan.json")])

    assert program.main() == INTERRUPTED
    assert capsys.readouterr().err == "mucudnn: interrupted; the proof was not finished.\n"


@pytest.mark.parametrize("option", ["--steps", "--twins", "--epochs", "--seeds"])
def test_nothing_is_trained_for_nothing(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["proof", option, "0"])
    with pytest.raises(SystemExit):
        program.main()
    assert f"argument {option}: must be at least 1, but got 0" in capsys.readouterr().err


def test_every_run_stands_with_its_accuracy_its_loss_and_its_time() -> None:
    *_, first, _, _, last = EPOCHS.told()
    assert first.split() == [
        *("0", "90.00%", "0.5000", "60.0", "s", "90.30%", "0.4000", "45.0", "s", "+0.30%", "1.33"),
    ]
    assert last == "  accuracies differ by at most 0.90%, bound 1%; x 1.33 (1.33 to 1.33)"


@pytest.mark.parametrize(
    ("exact", "near", "epochs"),
    [
        (Exact((2.0,), (3.0,)), NEAR, EPOCHS),
        (EXACT, dataclasses.replace(NEAR, divided=(2.0, 2.0)), EPOCHS),
        (EXACT, NEAR, Epochs(2, 300, (pair(0, 0.5, 0.9),))),
    ],
)
def test_all_three_have_to_hold(exact: Exact, near: Near, epochs: Epochs) -> None:
    assert Proof(EXACT, NEAR, EPOCHS).holds
    assert not Proof(exact, near, epochs).holds


def test_the_picture_has_every_curve() -> None:
    drawn = figure(Proof(EXACT, NEAR, EPOCHS))
    losses, distances = drawn.axes
    assert [*map(list, (line.get_ydata() for line in losses.lines))] == [[2.0, 0.5], [2.0, 0.4]] * 3
    assert [len(line.get_ydata()) for line in distances.lines] == [2] * 3  # two perturbed, one divided
    assert "3 random states" in titles(drawn)[0]


def small() -> nn.Module:
    """Three convolutions of 3x3 taps and a linear layer."""
    layers = [conv_norm(3, 8, 3, 1), nn.ReLU(), conv_norm(8, 8, 3, 1), nn.ReLU(), conv_norm(8, 8, 3, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


@pytest.mark.usefixtures("one_thread")
def test_everything_is_trained_from_equal_weights_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load()
    few = Digits(
        digits.train_images[:8], digits.train_labels[:8], digits.test_images[:4], digits.test_labels[:4]
    )
    monkeypatch.setattr(program, "load", lambda: few)
    monkeypatch.setattr(program, "_SMALL_BATCH", 4)
    monkeypatch.setattr(program, "resnet18", small)
    order: list[bool] = []
    train = program.train
    monkeypatch.setattr(
        program,
        "train",
        lambda model, *args, **kwargs: (order.append(is_patched(model)), train(model, *args, **kwargs))[1],
    )
    training = program._Training(a_plan_for(small(), few.train_images[:4]))

    exact, near, epochs = training.in_float64(16), training.in_float32(1, 1), training.epochs(1, 2)

    assert exact.holds
    assert exact.worst > 0  # another algorithm, though rounding hides that in most losses
    assert (len(exact.divided), len(near.divided), len(near.perturbed)) == (16, 1, 1)
    assert [len(each.unpatched.losses) for each in epochs.pairs] == [2, 2]
    assert all(min(each.unpatched.seconds, each.divided.seconds) > 0 for each in epochs.pairs)
    assert epochs.pairs[0].unpatched.losses != epochs.pairs[1].unpatched.losses
    assert epochs.pairs[0].unpatched.losses[0] == pytest.approx(epochs.pairs[0].divided.losses[0], rel=1e-4)
    assert order[-4:] == [False, True, True, False]


def is_patched(model: nn.Module) -> bool:
    return any("_conv_forward" in each.__dict__ for each in model.modules())


def test_the_program_keeps_all_losses_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = a_plan()
    plan.save(tmp_path / "plan.json")
    found = Proof(EXACT, NEAR, EPOCHS)
    monkeypatch.setattr(program, "_proven", lambda *_: found)
    output = tmp_path / "new" / "proof.json"
    arguments = ["--plan", str(tmp_path / "plan.json"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["proof", *arguments])

    assert program.main() == 0

    kept = json.loads(output.read_text())
    assert decode(Proof, kept["proof"]) == found
    assert kept["commit"] == commit()
    page = output.with_suffix(".html").read_text()
    assert "<svg" in page
    assert "accuracies differ by at most 0.90%" in page
    assert f"drawn in {output.with_suffix('.html')}" in capsys.readouterr().out
