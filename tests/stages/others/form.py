"""A form of a model of another library, small and of random weights: how one is made, and batches for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

SAMPLES = 8
TOLERANCE = 1e-9
MICROBATCHES = 4


_PACKAGES = {
    "open_clip": "open_clip_torch",
    "torch_geometric": "torch_geometric",
}  # others are called as they are imported


class Form(NamedTuple):
    """One model.

    Attributes:
        library: the module that is imported.
        name: the class of the model, or its name in the library, and in which form.
        make: makes the model, given the library.
        inputs: makes the inputs of a batch from a generator: one, or a tuple, or a dict of the forward's keywords.
        blocks: as in `Pipeline.from_module`.
        microbatches: into how many parts a batch is split; 1 if its samples belong together.
        tolerance: the largest difference that counts as equal; larger for a model that computes in float32.
    """

    library: str
    name: str
    make: Callable[[Any], nn.Module]
    inputs: Callable[[torch.Generator], Any]
    blocks: Any = None
    microbatches: int = MICROBATCHES
    tolerance: float = TOLERANCE

    @property
    def title(self) -> str:
        """Its name among all forms."""
        return f"{self.package}: {self.name}"

    @property
    def package(self) -> str:
        """The name under which the library is installed."""
        package = self.library.partition(".")[0]
        return _PACKAGES.get(package, package.replace("_", "-"))

    def made(self) -> nn.Module:
        """The model in float64 and in training, without dropout, with random weights."""
        torch.manual_seed(0)
        module = self.make(loaded(self.library)).double().train()
        randomise(module)
        for each in module.modules():
            for probability in ("p", "drop_prob", "dropout_prob"):
                if isinstance(vars(each).get(probability), float):
                    setattr(each, probability, 0.0)
        return module

    def batch(self, seed: int) -> tuple[Any, Tensor]:
        """Inputs and labels, which no loss reads."""
        return self.inputs(torch.Generator().manual_seed(seed)), torch.zeros(SAMPLES)


def loaded(library: str) -> Any:
    """The library. torchvision and torchaudio, which others import, are built for CUDA: where it is missing, they are
    imported without their compiled parts, which no form needs.
    """
    if not torch.cuda.is_available():
        _without_compiled_parts()
    return import_module(library)


@cache
def _without_compiled_parts() -> object:
    """Imports both, and returns what must stay alive."""
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):  # torchvision says how these behave on fake tensors
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with mock.patch("torch.ops.load_library", side_effect=OSError), mock.patch("pathlib.Path.glob", return_value=[]):
        for name in ("torchvision", "torchaudio"):
            with suppress(ModuleNotFoundError):
                import_module(name)
    return operators


def randomise(module: nn.Module) -> None:
    """Draws all weights anew, since some that begin as 0 or 1 would hide errors. Values stay of the same size from
    layer to layer.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() < 2:
                parameter.add_(drawn / 5)
            else:
                parameter.copy_(drawn / math.sqrt(parameter[0].numel()))


def normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Makes a batch of normal numbers; `shape` is that of a sample."""
    return lambda generator: torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)


def words(length: int, below: int = 32) -> Callable[[torch.Generator], Tensor]:
    """Makes a batch of sentences."""
    return lambda generator: torch.randint(below, (SAMPLES, length), generator=generator)


def image(size: int = 32, channels: int = 3) -> Callable[[torch.Generator], Tensor]:
    """Makes a batch of square images."""
    return normal(channels, size, size)


def several(*makers: Callable[[torch.Generator], Any]) -> Callable[[torch.Generator], tuple[Any, ...]]:
    """Makes several inputs."""
    return lambda generator: tuple(make(generator) for make in makers)


def named(**makers: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    """Makes inputs by name; what cannot be called is passed as it is."""
    return lambda generator: {name: make(generator) if callable(make) else make for name, make in makers.items()}
