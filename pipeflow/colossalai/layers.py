"""ColossalAI's `colossalai.nn`, in tutorials `from colossalai import nn as col_nn`, whose layers depend only on their
arguments, never on layers made before; its precisions; the layers of `colossalai.shardformer.layer`, which can be made
from torch's; and its `colossalai.builder` of models from lists of layers, with the registries that name these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, AdamW

import pipeflow.engine.tensor as ours
from pipeflow.colossalai.policies import mode_of
from pipeflow.colossalai.processes import tensor_group
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import partition_uniform
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.training.build import build_stages, cut_layers
from pipeflow.training.layers import Layers, Registry, makers, named_layers
from pipeflow.training.logging import get_dist_logger

VOCAB_PARALLEL_LIMIT = 2048  # a vocabulary with up to this number of embeddings or classes is not split


def Linear(  # noqa: N802  # its name there
    in_features: int, out_features: int, bias: bool = True, *, input_is_parallel: bool = False, **options: Any
) -> ours.ColumnParallelLinear | ours.RowParallelLinear:
    """Makes a ColumnParallelLinear, which splits its output unless `gather_output=True`; or, with
    `input_is_parallel=True`, a RowParallelLinear, whose input is split, as after a Linear. `options` are that layer's.
    """
    if not input_is_parallel:
        return ours.ColumnParallelLinear(in_features, out_features, bias, **options)
    if options.pop("gather_output", False):
        raise UsageError("Linear with input_is_parallel=True already returns a whole output: remove gather_output")
    return ours.RowParallelLinear(in_features, out_features, bias, **options)


def Embedding(  # noqa: N802  # its name there
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    *,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> ours.VocabParallelEmbedding | ours.HiddenParallelEmbedding:
    """Makes a VocabParallelEmbedding for more embeddings than the limit, else a HiddenParallelEmbedding."""
    layer = ours.VocabParallelEmbedding if num_embeddings > vocab_parallel_limit else ours.HiddenParallelEmbedding
    return layer(num_embeddings, embedding_dim, padding_idx, **options)


def Classifier(  # noqa: N802  # its name there
    in_features: int,
    num_classes: int,
    bias: bool = True,
    *,
    vocab_parallel_limit: int = VOCAB_PARALLEL_LIMIT,
    **options: Any,
) -> ours.VocabParallelClassifier | ours.Classifier:
    """Makes a VocabParallelClassifier for more classes than the limit, with split logits unless `gather_output=True`;
    else a Classifier, with whole logits.
    """
    layer = ours.VocabParallelClassifier if num_classes > vocab_parallel_limit else ours.Classifier
    return layer(in_features, num_classes, bias, **options)


def CrossEntropyLoss(*, num_classes: int | None = None, **options: Any) -> ours.CrossEntropy:  # noqa: N802  # its name there
    """Makes a CrossEntropy of logits that are whole, or split over `num_classes`. `options` are that layer's."""
    return ours.CrossEntropy(vocab_size=num_classes, **options)


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


_OURS = {"parallel_input": "input_is_parallel", "sp_partial_derived": "sequence_parallel"}


def _named(name: str, kind: Any) -> Any:
    """A class of `pipeflow.tensor` under ColossalAI's name, whose `from_native_module` takes ColossalAI's arguments:
    `process_group` is a group of torch.distributed or of pipeflow, by default the context's tensor group;
    `seq_parallel_mode="split_gather"`, and `sp_partial_derived=True` of a norm, mean `sequence_parallel=True`.
    """

    def from_native_module(
        cls: Any, /, module: nn.Module, group: Any = None, *, process_group: Any = None, **options: Any
    ) -> Any:
        if (mode := options.pop("seq_parallel_mode", None)) is not None:
            options["sequence_parallel"] = mode_of(mode, is_enabled=True, overlaps=False) is not None
        given = process_group if group is None else group
        own = None if given is None else tensor_group(given)
        options = {_OURS.get(option, option): value for option, value in options.items()}
        return kind.from_native_module.__func__(cls, module, own, **options)

    its = {"from_native_module": classmethod(from_native_module), "__module__": __name__, "__doc__": kind.__doc__}
    return type(name, (kind,), its)


Linear1D_Col = _named("Linear1D_Col", ours.ColumnParallelLinear)
Linear1D_Row = _named("Linear1D_Row", ours.RowParallelLinear)
Classifier1D = _named("Classifier1D", ours.Classifier)
VocabParallelClassifier1D = _named("VocabParallelClassifier1D", ours.VocabParallelClassifier)
VocabParallelEmbedding1D = _named("VocabParallelEmbedding1D", ours.VocabParallelEmbedding)
Embedding1D = _named("Embedding1D", ours.HiddenParallelEmbedding)
PatchEmbedding1D = _named("PatchEmbedding1D", ours.PatchEmbedding)
LayerNorm1D = _named("LayerNorm1D", ours.LayerNorm)
Dropout1D = _named("Dropout1D", ours.Dropout)
VocabParallelCrossEntropyLoss1D = _named("VocabParallelCrossEntropyLoss1D", ours.VocabParallelCrossEntropy)


LAYERS = Registry("LAYERS", [nn])
MODELS = Registry("MODELS")


def build_pipeline_model(layers: Layers, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """Makes this rank's part of a model given as a list of layers, cut by `partition_uniform`. Returns a module, or an
    nn.ModuleList if there are several chunks.

    Args:
        layers: as in `pipeflow.training.build_stages`.
        num_chunks: number of stages per rank.
        verbose: if True, rank 0 logs how the layers are cut.

    Raises UsageError as partition_uniform and build_stages do.
    """
    return _built(layers, num_chunks, "layer", verbose)


def build_pipeline_model_from_cfg(
    config: Sequence[Mapping[str, Any]],
    num_chunks: int = 1,
    partition_method: str = "parameter",
    verbose: bool = False,
) -> nn.Module:
    """Like `build_pipeline_model`, from a list with one dict per layer. A rank creates only the layers of its own
    stages.

    Args:
        config: dicts; "type" is a name in LAYERS (which has torch.nn's classes) or MODELS, the other entries are the
            arguments.
        num_chunks, verbose: as in `build_pipeline_model`.
        partition_method: "layer" cuts by partition_uniform, "parameter" by the number of parameters.

    Raises UsageError for another method or an invalid dict, and as `build_pipeline_model` does.
    """
    return _built(makers(config, LAYERS, MODELS), num_chunks, partition_method, verbose)


def _built(layers: Layers, num_chunks: int, method: str, verbose: bool) -> nn.Module:
    context = context_if_launched()
    size = 1 if context is None else context.pipeline_size
    placement = Placement.looped(size, num_chunks)
    if method == "layer":
        dealt = partition_uniform(len(named_layers(layers)), size, num_chunks)
        parts = [part for chunk in zip(*dealt, strict=True) for part in chunk]
    elif method == "parameter":
        parts = cut_layers(layers, placement.num_stages, "parameters")
    else:
        raise UsageError(f'partition_method must be "layer" or "parameter", got {method!r}')
    if verbose:
        listed = (f"{stage} on rank {placement.rank_of(stage)}: {part}" for stage, part in enumerate(parts))
        get_dist_logger().info(f"the layers (start, end) of each stage: {'; '.join(listed)}", ranks=[0])
    chunks = build_stages(layers, placement, partition=parts)
    return chunks[0] if len(chunks) == 1 else chunks
