import pytest
import torch

from bench.data import Digits, batches, load


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load()


def numbered(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of one pixel that shows the image's number, which is its label too."""
    labels = torch.arange(n)
    return labels.reshape(n, 1, 1, 1).float(), labels


def test_digits_are_colour_images_of_32x32_with_one_label_each(digits: Digits) -> None:
    assert digits.train_images.shape == (1500, 3, 32, 32)
    assert digits.test_images.shape == (297, 3, 32, 32)
    assert digits.train_labels.shape == (1500,)
    assert digits.test_labels.shape == (297,)
    assert digits.train_images.dtype == torch.float32
    assert digits.train_labels.dtype == torch.int64


def test_split_is_disjoint_and_complete(digits: Digits) -> None:
    """All 1797 images differ, so that as many distinct ones are neither lost nor in both parts."""
    images = torch.cat([digits.train_images, digits.test_images])[:, 0].flatten(1)
    assert len(torch.unique(images, dim=0)) == 1797


def test_both_parts_hold_every_digit_about_equally_often(digits: Digits) -> None:
    assert digits.train_labels.bincount().tolist() == [151, 148, 150, 155, 155, 150, 153, 144, 145, 149]
    assert digits.test_labels.bincount().tolist() == [27, 34, 27, 28, 26, 32, 28, 35, 29, 31]


def test_training_images_have_mean_0_and_deviation_1(digits: Digits) -> None:
    deviation, mean = torch.std_mean(digits.train_images.double())
    assert mean.item() == pytest.approx(0, abs=1e-5)
    assert deviation.item() == pytest.approx(1, abs=1e-5)


def test_all_channels_show_the_same_grey_image(digits: Digits) -> None:
    assert torch.equal(digits.test_images[:, 0], digits.test_images[:, 1])
    assert torch.equal(digits.test_images[:, 0], digits.test_images[:, 2])


def test_images_of_one_digit_are_more_alike_than_images_of_two(digits: Digits) -> None:
    zeros, ones = (digits.train_images[digits.train_labels == digit] for digit in (0, 1))
    centre = zeros.mean(dim=0)
    assert (zeros - centre).square().mean() < (ones - centre).square().mean()


def test_loading_twice_gives_the_same_digits(digits: Digits) -> None:
    again = load()
    assert torch.equal(again.train_images, digits.train_images)
    assert torch.equal(again.test_labels, digits.test_labels)


def test_batches_hold_every_image_once_with_its_label() -> None:
    parts = list(batches(*numbered(10), 4, torch.Generator().manual_seed(0)))
    assert [len(images) for images, _ in parts] == [4, 4, 2]
    assert all(torch.equal(images.flatten().long(), labels) for images, labels in parts)
    assert sorted(torch.cat([labels for _, labels in parts]).tolist()) == list(range(10))


def test_batches_without_a_generator_keep_the_order() -> None:
    assert [labels.tolist() for _, labels in batches(*numbered(5), 2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("n", "sizes"), [(10, [4, 4]), (8, [4, 4]), (3, []), (0, [])])
def test_dropping_the_last_batch_leaves_only_whole_ones(n: int, sizes: list[int]) -> None:
    assert [len(labels) for _, labels in batches(*numbered(n), 4, drop_last=True)] == sizes


def test_the_seed_alone_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        shuffled = batches(*numbered(100), 100, torch.Generator().manual_seed(seed))
        return [int(label) for _, labels in shuffled for label in labels]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_one_generator_draws_another_order_for_the_next_epoch() -> None:
    generator = torch.Generator().manual_seed(0)
    (_, first), (_, second) = (next(batches(*numbered(100), 100, generator)) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_batch_size_below_one_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, but got 0"):
        batches(*numbered(3), 0)


def test_images_without_labels_are_refused() -> None:
    images, labels = numbered(3)
    with pytest.raises(ValueError, match="every image must have one label, but got 3 images and 2 labels"):
        batches(images, labels[:2], 1)
