"""The images that the vision transformer learns: digits, and CIFAR-10 through a torchvision that is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import pipeflow
from vit.data import Images, load_images


def tensors(images: Images) -> tuple[TensorDataset, TensorDataset]:
    assert isinstance(images.train, TensorDataset)
    assert isinstance(images.test, TensorDataset)
    return images.train, images.test


@pytest.fixture
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA", raising=False)


@pytest.mark.usefixtures("_no_data")
@pytest.mark.slow  # scikit-learn takes a second to import
def test_digits_are_cut_without_overlap_and_always_alike() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    train, test = tensors(load_images(8, channels=1))
    assert (len(train), len(test)) == (1438, 359)
    flat = [part.tensors[0].flatten(1) for part in (train, test)]
    original = torch.from_numpy(sklearn.load_digits().data).float()
    rows = [{tuple(row) for row in (part * scale(original, flat[0])).round().int().tolist()} for part in flat]
    assert len(rows[0] | rows[1]) == len(original) == len(rows[0]) + len(rows[1])
    again = tensors(load_images(8, channels=1))
    assert all(part.tensors[0].equal(one.tensors[0]) for part, one in zip((train, test), again, strict=True))
    assert set(train.tensors[1].tolist()) == set(test.tensors[1].tolist()) == set(range(10))


def scale(original: Tensor, normalised: Tensor) -> float:
    """By how much the originals, which are whole numbers, differ more than the normalised ones."""
    return float((original.max() - original.min()) / (normalised.max() - normalised.min()))


@pytest.mark.usefixtures("_no_data")
@pytest.mark.slow  # scikit-learn takes a second to import
def test_digits_are_enlarged_and_normalised() -> None:
    pytest.importorskip("sklearn")
    train, test = tensors(load_images(32))
    images = train.tensors[0]
    assert images.shape[1:] == test.tensors[0].shape[1:] == (3, 32, 32)
    assert images.dtype == torch.float32
    assert float(images.mean()) == pytest.approx(0, abs=1e-3)
    assert float(images.std()) == pytest.approx(1, abs=1e-3)
    assert images[:, 0].equal(images[:, 2])


def fake_torchvision(has_files: bool) -> dict[str, ModuleType]:
    """What of torchvision is used, which notes what it is asked for."""

    class CIFAR10:
        def __init__(self, root: str, train: bool, transform: object) -> None:
            if not has_files:
                raise RuntimeError("Dataset not found or corrupted.")
            self.asked = root, train, transform

    def named(name: str) -> Callable[..., object]:
        return lambda *arguments, **options: (name, *arguments, *options.values())

    datasets, transforms = ModuleType("torchvision.datasets"), ModuleType("torchvision.transforms")
    vars(datasets)["CIFAR10"] = CIFAR10
    for name in ("Resize", "RandomCrop", "AutoAugment", "ToTensor", "Normalize"):
        setattr(transforms, name, named(name))
    vars(transforms).update(Compose=list, AutoAugmentPolicy=SimpleNamespace(CIFAR10="its policy"))
    package = ModuleType("torchvision")
    vars(package).update(datasets=datasets, transforms=transforms)
    return {"torchvision": package, "torchvision.datasets": datasets, "torchvision.transforms": transforms}


def test_cifar_comes_from_the_folder_that_data_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATA", str(tmp_path))
    for name, module in fake_torchvision(has_files=True).items():
        monkeypatch.setitem(sys.modules, name, module)
    images: Any = load_images(64)
    tensor = [("ToTensor",), ("Normalize", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))]
    augmented = [("Resize", 64), ("RandomCrop", 64, 8), ("AutoAugment", "its policy")]
    assert images.train.asked == (str(tmp_path), True, augmented + tensor)
    assert images.test.asked == (str(tmp_path), False, [("Resize", 64), *tensor])
    assert images.classes == 10


def test_a_folder_without_cifar_is_an_error_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATA", str(tmp_path))
    for name, module in fake_torchvision(has_files=False).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(pipeflow.UsageError, match=r"has no CIFAR-10: download it once, by python .*download=True"):
        load_images(32)


@pytest.mark.parametrize(
    ("data", "module", "package"),
    [("", "sklearn.datasets", "scikit-learn"), ("here", "torchvision.datasets", "torchvision")],
)
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, data: str, module: str, package: str) -> None:
    monkeypatch.setenv("DATA", data)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pipeflow.UsageError, match=f"needs {package}: pip install {package}"):
        load_images(32)
