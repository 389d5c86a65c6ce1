"""The images: scikit-learn's handwritten digits, which need no network, or CIFAR-10 from the folder $DATA.

The digits are 1,797 real images of 8 x 8 pixels, the test set of the UCI repository's "Optical Recognition of
Handwritten Digits", enlarged to the model's size.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import pipeflow

TEST_SHARE = 0.2  # of the digits
SPLIT_SEED = 0
CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class Images(NamedTuple):
    """Two data sets of pairs: a normalized float32 image (channels, size, size), and the index of its class."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int


def load_images(image_size: int, channels: int = 3) -> Images:
    """CIFAR-10 from the folder $DATA if that is set, else the digits; `channels` is for the digits, which are grey.

    Raises UsageError if scikit-learn (for CIFAR-10 torchvision) is not installed, or if $DATA has no CIFAR-10.
    """
    folder = os.environ.get("DATA")
    return load_cifar10(Path(folder), image_size) if folder else load_digits(image_size, channels)


def load_digits(image_size: int, channels: int = 3) -> Images:
    """The digits, split into 1,438 training and 359 test images, always the same ones. All channels are equal, with
    mean 0 and standard deviation 1 over the training images.

    Raises UsageError if scikit-learn is not installed.
    """
    samples = _required("sklearn.datasets", "scikit-learn", "the handwritten digits").load_digits()
    images, labels = torch.from_numpy(samples.images).float()[:, None], torch.from_numpy(samples.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order.tensor_split([int(TEST_SHARE * len(order))])
    enlarged = functional.interpolate(images, image_size, mode="bilinear")
    deviation, mean = torch.std_mean(enlarged[train])
    normalised = ((enlarged - mean) / deviation).expand(-1, channels, -1, -1)
    first, second = (TensorDataset(normalised[part], labels[part]) for part in (train, test))
    return Images(first, second, classes=10)


def load_cifar10(folder: Path, image_size: int) -> Images:
    """CIFAR-10 through torchvision: 50,000 training images, randomly cropped and augmented by AutoAugment's policy for
    CIFAR-10, and 10,000 test images. Nothing is downloaded, because every process would.

    Raises UsageError if torchvision is not installed, or if the folder has no CIFAR-10.
    """
    sets = _required("torchvision.datasets", "torchvision", "CIFAR-10 in $DATA")
    transforms = _required("torchvision.transforms", "torchvision", "CIFAR-10 in $DATA")
    tensor = [transforms.ToTensor(), transforms.Normalize(CIFAR_MEAN, CIFAR_DEVIATION)]
    augmented = [
        transforms.Resize(image_size),
        transforms.RandomCrop(image_size, padding=image_size // 8),
        transforms.AutoAugment(policy=transforms.AutoAugmentPolicy.CIFAR10),
    ]
    plain = [transforms.Resize(image_size)]
    try:
        train, test = (
            sets.CIFAR10(root=str(folder), train=train, transform=transforms.Compose([*steps, *tensor]))
            for train, steps in ((True, augmented), (False, plain))
        )
    except RuntimeError as error:  # torchvision's way to say that files are missing or damaged
        raise pipeflow.UsageError(
            f"DATA={folder} has no CIFAR-10: download it once, by "
            f"python -c \"import torchvision; torchvision.datasets.CIFAR10('{folder}', download=True)\", or unset DATA "
            "to train on handwritten digits"
        ) from error
    return Images(train, test, classes=10)


def _required(module: str, package: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise pipeflow.UsageError(f"{what} needs {package}: pip install {package}") from error
