"""ColossalAI's `colossalai.nn`, in tutorials `from colossalai import nn as col_nn`, and its precisions. The layer that
a name stands for depends only on its arguments, never on layers made before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer, lr_scheduler

from pipeflow.core.errors import UsageError
from pipeflow.engine.tensor.cross_entropy import CrossEntropy
from pipeflow.engine.tensor.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from pipeflow.engine.tensor.linear import Classifier as RowClassifier
from pipeflow.engine.tensor.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelClassifier
from pipeflow.training.optim.rates import PolynomialWarmupLR

VOCAB_PARALLEL_LIMIT = 2048  # a vocabulary with up to this number of embeddings or classes is not split


def Linear(  # noqa: N802  # its name there
    in_features: int, out_features: int, bias: bool = True, *, input_is_parallel: bool = False, **options: Any
) -> ColumnParallelLinear | RowParallelLinear:
    """Makes a ColumnParallelLinear, which splits its output unless `gather_output=True`; or, with
    `input_is_parallel=True`, a RowParallelLinear, whose input is split, as after a Linear. `options` are that layer's.
    """
    if not input_is_parallel:
        return ColumnParallelLinear(in_features, out_features, bias, **options)
    if options.pop("gather_output", False):
        raise UsageError("Linear with input_is_parallel=True already returns a whole output: remove gather_output")
    return RowParallelLinear(in_features, out_features, bias, **options)


def Embedding(  # noqa: N802  # its name there
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    *,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> VocabParallelEmbedding | HiddenParallelEmbedding:
    """Makes a VocabParallelEmbedding for more embeddings than the limit, else a HiddenParallelEmbedding."""
    layer = VocabParallelEmbedding if num_embeddings > vocab_parallel_limit else HiddenParallelEmbedding
    return layer(num_embeddings, embedding_dim, padding_idx, **options)


def Classifier(  # noqa: N802  # its name there
    in_features: int,
    num_classes: int,
    bias: bool = True,
    *,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> VocabParallelClassifier | RowClassifier:
    """Makes a VocabParallelClassifier for more classes than the limit, with split logits unless `gather_output=True`;
    else a Classifier, with whole logits.
    """
    layer = VocabParallelClassifier if num_classes > vocab_parallel_limit else RowClassifier
    return layer(in_features, num_classes, bias, **options)


def CrossEntropyLoss(*, num_classes: int | None = None, **options: Any) -> CrossEntropy:  # noqa: N802  # its name there
    """Makes a CrossEntropy of logits that are whole, or split over `num_classes`. `options` are that layer's."""
    return CrossEntropy(vocab_size=num_classes, **options)


class Accuracy(nn.Module):
    """Number of samples in a batch whose label has the largest score, an integer scalar."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Takes whole logits [batch, classes] as `outputs`, and `labels` [batch]."""
        return (outputs.argmax(-1) == labels.to(outputs.device)).sum()


class AMP_TYPE(StrEnum):  # noqa: N801  # its name in every tutorial
    """Ways to train a model in 16 bits; each is a mode of HalfPrecision."""

    NAIVE = "parameters"
    TORCH = "autocast"
    APEX = "apex"  # NVIDIA's, not supported


def HybridAdam(  # noqa: N802  # its name there
    model_params: Any, lr: float = 1e-3, *, weight_decay: float = 0.0, adamw_mode: bool = True, **options: Any
) -> Adam:
    """Makes torch's AdamW, or its Adam with `adamw_mode=False`. `options` are theirs."""
    return (AdamW if adamw_mode else Adam)(model_params, lr=lr, weight_decay=weight_decay, **options)


Factor = Callable[[int], float]


def CosineAnnealingLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1
) -> lr_scheduler.CosineAnnealingLR:
    """Makes torch's CosineAnnealingLR with T_max=total_steps."""
    return lr_scheduler.CosineAnnealingLR(optimizer, total_steps, eta_min, last_epoch)


def PolynomialLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, end_lr: float = 0.0001, power: float = 1.0, last_epoch: int = -1
) -> PolynomialWarmupLR:
    """Makes a PolynomialWarmupLR without a warm-up, since torch's PolynomialLR has no `end_lr`."""
    return PolynomialWarmupLR(optimizer, total_steps, 0, end_lr, power, last_epoch)


def OneCycleLR(optimizer: Optimizer, total_steps: int, **options: Any) -> lr_scheduler.OneCycleLR:  # noqa: N802  # its name there
    """Makes torch's OneCycleLR with the groups' rates as `max_lr`."""
    return lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], total_steps, **options)


def MultiStepLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1
) -> lr_scheduler.MultiStepLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.MultiStepLR(optimizer, milestones, gamma, last_epoch)


def StepLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
) -> lr_scheduler.StepLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.StepLR(optimizer, step_size, gamma, last_epoch)


def ExponentialLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1
) -> lr_scheduler.ExponentialLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.ExponentialLR(optimizer, gamma, last_epoch)


def LambdaLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, lr_lambda: Factor | list[Factor], last_epoch: int = -1
) -> lr_scheduler.LambdaLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.LambdaLR(optimizer, lr_lambda, last_epoch)


def MultiplicativeLR(  # noqa: N802  # its name there
    optimizer: Optimizer, total_steps: int, lr_lambda: Factor | list[Factor], last_epoch: int = -1
) -> lr_scheduler.MultiplicativeLR:
    """torch's: it needs no `total_steps`."""
    return lr_scheduler.MultiplicativeLR(optimizer, lr_lambda, last_epoch)
