"""A family of models of transformers, tiny and of random weights: how one is made, with a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeflow.engine.stages.criterion import loss_in

Made = tuple[nn.Module, dict[str, Any]]
Sizes = dict[str, Any]
WORDS = 64


class Family(NamedTuple):
    """One configuration of one class.

    Attributes:
        model: the class.
        config: that of its configuration.
        sizes: what the configuration is made of.
        batch: makes three samples.
        tolerance: of gradients and outputs, relative; more than 1e-9 where part of the model computes in float32.
        why: what that part is.
        is_shifted: whether each label is predicted at the word before it.
        is_together: whether the samples of a batch depend on each other, so that it must not be split.
        is_alone: whether only stages without ranks are compared: models draw from NumPy's generator, which ranks that
            are threads share, or take entries that have no place for each sample.
        prepare: changes the model before it is cut.
        is_whole: whether the loss is not a mean over its samples: it has two terms, or a divisor of its own.
    """

    model: str
    config: str
    sizes: Sizes
    batch: Callable[[], dict[str, Any]]
    tolerance: float = 1e-9
    why: str = ""
    is_shifted: bool = False
    is_together: bool = False
    is_alone: bool = False
    prepare: Callable[[Any], object] | None = None
    is_whole: bool = False

    def make(self, transformers: Any) -> Made:
        """A model in float64 all of whose weights are random, and a batch for it."""
        config = getattr(transformers, self.config)(**self.sizes)
        config._experts_implementation = "batched_mm"  # what it would choose knows no float64
        made: nn.Module = getattr(transformers, self.model)(config).double().train()
        randomise(made)
        if self.prepare is not None:
            self.prepare(made)
        return made, self.batch()

    @property
    def weigh(self) -> Callable[[Any], float] | None:
        """`weigh=` for losses that are not proved to be sums over samples: that of experts, a product of means over
        words, one over a word of each text that a mask picks, and one over a mask that the model writes in place. None
        for other losses.
        """
        written = ("T5ForSequenceClassification", "ViTMAEForPreTraining")
        is_proved = self.model not in written and not self.sizes.get("output_router_logits")
        return None if is_proved else lambda given: self.weight(given if isinstance(given, dict) else {"labels": given})

    def weight(self, part: dict[str, Any]) -> float:
        """What the mean in the loss of some samples is over."""
        labels = part.get("labels")
        if labels is None:
            return 1.0
        if labels.dim() < 2 or labels.is_floating_point():
            return float(len(labels))
        return float((labels[:, int(self.shifts) :] != -100).sum())

    @property
    def shifts(self) -> bool:
        """Whether each label is predicted at the word before it."""
        return self.is_shifted or self.model.endswith(("ForCausalLM", "GPT2LMHeadModel"))


def randomise(module: nn.Module, seed: int = 1) -> None:
    """Draws all weights anew, since some that begin as 0 or 1 would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5)


def floats(output: object) -> list[Tensor]:
    """The tensors of real numbers in a model's output, without its loss."""
    loss = loss_in(output)
    found = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
    return [each for each in found if each is not loss]


def criterion(output: object, labels: object = None) -> Tensor:
    """A model's own loss; without a head, the mean over the samples of a function of all that it returned."""
    loss = loss_in(output)
    if loss is not None:
        return loss
    means = [each.sin().double().flatten(1).mean() for each in floats(output) if each.requires_grad]
    return reduce(torch.add, means)
