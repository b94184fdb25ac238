from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from bench.data import Digits, load
from bench.networks import resnet18
from bench.training import accuracy, perturbed, train
from tests.threads import threads


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Layers this small are slower on two threads that wait for each other, above all on a busy machine."""
    with threads(1):
        yield


@pytest.fixture(scope="module")
def digits() -> Digits:
    """So few of the digits, at half their height and width, that training takes a moment."""
    every = load()
    return Digits(
        train_images=every.train_images[:72, :, ::2, ::2],
        train_labels=every.train_labels[:72],
        test_images=every.test_images[:32, :, ::2, ::2],
        test_labels=every.test_labels[:32],
    )


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return resnet18(width=8)


class Echo(nn.Module):
    """Scores that are the image itself, which has one pixel per class."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) * self.one


def test_losses_fall_within_a_few_steps(digits: Digits) -> None:
    run = train(small_network(), digits, epochs=4, batch_size=24, seed=0)
    assert len(run.losses) == 12
    assert sum(run.losses[-3:]) < 0.7 * sum(run.losses[:3])


def test_the_first_loss_is_the_cross_entropy_of_the_untrained_model(digits: Digits) -> None:
    model = small_network()
    everything = len(digits.train_images)
    scores = deepcopy(model).train()(digits.train_images)
    run = train(model, digits, epochs=1, batch_size=everything, seed=0)
    expected = nn.functional.cross_entropy(scores, digits.train_labels).item()
    assert run.losses[0] == pytest.approx(expected, rel=1e-5)  # float32 sums in another order


def test_the_same_seed_gives_bitwise_the_same_run(digits: Digits) -> None:
    model = small_network()
    runs = [train(deepcopy(model), digits, epochs=2, batch_size=24, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_steps_follow_the_gradient_with_momentum_and_weight_decay() -> None:
    """v <- momentum v + (gradient + decay w), w <- w - rate v; Sutskever et al. 2013 with dampening 0."""
    images, labels = torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])
    model = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    nn.init.eye_(model.weight)
    w, v = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(3):
        gradient = (w.softmax(dim=0) - torch.eye(2)) / 2  # of the mean cross-entropy, where x is one-hot
        v = 0.8 * v + gradient + 0.1 * w
        w = w - 0.5 * v
    two = Digits(images, labels, images, labels)
    train(model, two, 3, 2, 0, learning_rate=0.5, momentum=0.8, weight_decay=0.1)
    assert torch.allclose(model.weight, w, rtol=1e-12)


def test_another_seed_gives_another_order_of_the_images(digits: Digits) -> None:
    model = small_network()
    runs = [train(deepcopy(model), digits, 1, 24, seed, steps=1) for seed in (0, 1)]
    assert runs[0].losses != runs[1].losses


def test_steps_ends_training_early_with_the_same_first_losses(digits: Digits) -> None:
    model = small_network()
    whole = train(deepcopy(model), digits, epochs=2, batch_size=24, seed=0)
    part = train(model, digits, epochs=2, batch_size=24, seed=0, steps=4)
    assert part.losses == whole.losses[:4]


def test_dropping_the_last_batch_leaves_only_whole_mini_batches(digits: Digits) -> None:
    sizes: list[int] = []
    model = small_network()
    model.register_forward_pre_hook(
        lambda module, images: sizes.append(len(images[0])) if module.training else None
    )
    train(model, digits, epochs=2, batch_size=40, seed=0, drop_last=True)
    assert sizes == [40, 40]


def test_every_step_is_told_with_its_number_and_loss(digits: Digits) -> None:
    told: list[tuple[int, float]] = []
    run = train(small_network(), digits, 1, 24, 0, on_step=lambda step, loss: told.append((step, loss)))
    assert told == list(enumerate(run.losses))


def test_the_run_ends_with_the_accuracy_of_the_trained_model_on_held_out_images(digits: Digits) -> None:
    model = small_network()
    run = train(model, digits, epochs=2, batch_size=24, seed=0)
    assert run.accuracy == accuracy(model, digits.test_images, digits.test_labels, batch_size=24)
    assert model.training


def test_a_float64_model_is_trained_in_float64(digits: Digits) -> None:
    single = small_network()
    double = deepcopy(single).double()
    narrow = train(single, digits, 1, 24, 0, steps=1)
    wide = train(double, digits, 1, 24, 0, steps=1)
    assert all(weight.dtype == torch.float64 for weight in double.parameters())
    assert wide.losses != narrow.losses
    assert wide.losses == pytest.approx(narrow.losses, rel=1e-5)  # the rounding of float32


def test_channels_last_reaches_images_and_weights_and_changes_only_rounding(digits: Digits) -> None:
    model = small_network()
    plain = train(deepcopy(model), digits, 1, 24, 0, steps=1)
    layouts: list[bool] = []
    model.register_forward_pre_hook(
        lambda _, images: layouts.append(images[0].is_contiguous(memory_format=torch.channels_last))
    )
    run = train(model, digits, 1, 24, 0, steps=1, channels_last=True)
    assert layouts == [True] * 3  # one step, two batches of the test
    assert model.stem.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)


def test_accuracy_is_the_share_of_right_labels_over_uneven_batches() -> None:
    images = torch.eye(5).reshape(5, 5, 1, 1)
    assert accuracy(Echo(), images, torch.tensor([0, 1, 2, 0, 4]), batch_size=2) == 0.8


def test_accuracy_is_that_of_the_model_in_evaluation_mode() -> None:
    model = nn.Sequential(Echo(), nn.Dropout(p=1.0)).train()  # which would score nothing in training mode
    assert accuracy(model, torch.eye(3), torch.tensor([0, 1, 2]), batch_size=3) == 1.0


def test_accuracy_gives_every_module_its_own_mode_back() -> None:
    model = nn.Sequential(Echo(), nn.Dropout()).train()
    model[1].eval()
    accuracy(model, torch.eye(2), torch.tensor([0, 1]), batch_size=2)
    assert [module.training for module in model.modules()] == [True, True, False]


def test_accuracy_of_no_images_is_refused() -> None:
    with pytest.raises(ValueError, match="accuracy needs at least one image, but got 0"):
        accuracy(Echo(), torch.empty(0, 2), torch.empty(0), batch_size=1)


@pytest.mark.parametrize("relative", [1e-7, 1e-3])
def test_perturbation_is_normal_noise_of_the_stated_relative_size(relative: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(100, 100, dtype=torch.float64)  # 10,000 weights: 0.7 % standard error of the deviation
    ratios = (perturbed(model, 1, relative).weight / model.weight - 1) / relative
    assert ratios.std().item() == pytest.approx(1, rel=0.03)
    assert ratios.mean().item() == pytest.approx(0, abs=0.04)


def test_perturbing_float32_moves_most_weights_by_a_few_units_in_the_last_place() -> None:
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    twin = perturbed(model, seed=1)
    changes = (twin.weight.double() / model.weight.double() - 1).abs()
    assert (changes > 0).double().mean() > 0.5
    assert changes.max() < 6e-7  # five deviations of noise and half a unit in the last place


def test_perturbing_leaves_the_model_itself_alone() -> None:
    model = small_network()
    before = deepcopy(model.state_dict())
    twin = perturbed(model, seed=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(twin.stem.conv.weight, model.stem.conv.weight)


def test_a_perturbation_is_the_same_for_the_same_seed_only() -> None:
    weight = [perturbed(small_network(), seed).stem.conv.weight for seed in (1, 1, 2)]
    assert torch.equal(weight[0], weight[1])
    assert not torch.equal(weight[0], weight[2])
