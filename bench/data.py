"""Real images for the demonstrations: scikit-learn's handwritten digits in the form that networks read."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

IMAGE_SIZE = 32
TRAIN_IMAGES = 1500


@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
    """Images with the digit that each one shows, in a part to learn from and a part held out.

    Attributes:
        train_images: shape (n, 3, 32, 32), float32, mean 0 and standard deviation 1.
        train_labels: shape (n,), int64, 0 to 9.
        test_images: as `train_images`, shifted and scaled by the same two numbers.
        test_labels: as `train_labels`.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load() -> Digits:
    """Return the 1797 digits bundled with scikit-learn, the same at every call, without a download.

    1500 drawn at random, always the same, are for training and the other 297 held out: the order of the
    data set follows its writers, and the last ones' hands alone make a harder test than the rest. Mean and
    standard deviation are those of the training images alone.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository; the copy in `sklearn.datasets.load_digits`.
    """
    from sklearn.datasets import load_digits  # not for whoever trains on other data, as on a GPU

    source = load_digits()
    images = _enlarged(torch.tensor(source.images, dtype=torch.float32))
    labels = torch.tensor(source.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    deviation, mean = torch.std_mean(images[:TRAIN_IMAGES])
    images = (images - mean) / deviation
    return Digits(
        train_images=images[:TRAIN_IMAGES],
        train_labels=labels[:TRAIN_IMAGES],
        test_images=images[TRAIN_IMAGES:],
        test_labels=labels[TRAIN_IMAGES:],
    )


def _enlarged(images: Tensor) -> Tensor:
    """Return the grey images (n, 8, 8) as (n, 3, 32, 32), all channels alike.

    Bilinear without antialiasing, which matters only where images shrink.
    """
    one_channel = nn.functional.interpolate(
        images.unsqueeze(1), size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear"
    )
    return one_channel.expand(-1, 3, -1, -1).contiguous()


def batches(
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    generator: torch.Generator | None = None,
    drop_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every image once with its label, `batch_size` at a time.

    Args:
        images: shape (n, ...).
        labels: shape (n,).
        batch_size: images in a batch, at least 1.
        generator: draws the order, at the call; None keeps the order of `images`.
        drop_last: whether the last batch is left out if it is smaller than the others.

    Raises:
        ValueError: `batch_size` is below 1, or there are not as many labels as images.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, but got {batch_size}.")
    n = len(images)
    if len(labels) != n:
        raise ValueError(f"every image must have one label, but got {n} images and {len(labels)} labels.")
    order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
    end = n - n % batch_size if drop_last else n
    parts = (order[start : start + batch_size] for start in range(0, end, batch_size))
    return ((images[part], labels[part]) for part in parts)
