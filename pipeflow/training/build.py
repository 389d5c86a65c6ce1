"""This rank's stages of a model that is given as a list of layers. What must not live here: how layers are measured,
and how stages run.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.parallel.context import context_if_launched
from pipeflow.parallel.sharding import splits_of
from pipeflow.planning.layer_costs import LayerCosts
from pipeflow.planning.partition import Cut, Part, stage_parts
from pipeflow.runtime.gradients.ties import PipelineSharedModuleWrapper
from pipeflow.tensor.division import whole_shape
from pipeflow.training.layers import Layer, Layers, drawing_from, make_layer, named_layers

LOG = logging.getLogger("pipeflow")
Partition = Cut | Literal["parameters"] | LayerCosts


def build_stages(
    layers: Layers, placement: Placement | None = None, *, partition: Partition = "uniform", seed: int | None = None
) -> nn.ModuleList:
    """This rank's stages of the model whose layers these are, each an nn.Sequential, in the order of its chunks: for
    `Pipeline`. A layer keeps its name of the whole model in its stage, so parameters and checkpoints have the same
    names under any layout, those of the plain nn.Sequential.

    Args:
        layers: an nn.Sequential, or a list of modules and of callables that make them, such as
            `functools.partial(Block, width)`. A rank calls those of its own stages alone. Each layer takes one
            argument, what the layer before it returned.
        placement: of the schedule; unless given, each rank has one stage. Without a launch there is one rank.
        partition: "uniform" gives each stage equally many layers; "parameters" makes the stage with the most parameters
            as small as it can be; `measure_layers(...)` does so for the slowest one, and a list of weights, one a
            layer, for the heaviest one; pairs `(start, end)`, one a stage, are the stages. The same on all ranks.
        seed: callables draw their layer's first weights from it and the layer's name, so that they are the same under
            any layout. Unless given, they draw from torch's default generator as it is.

    A parameter that layers of several stages have, as one object, is tied over the ranks of these stages, as
    PipelineSharedModuleWrapper does. The log "pipeflow" is told the number of parameters per stage.

    Raises UsageError for what is no list of layers, for a placement that does not fit the ranks, for fewer layers than
    stages, and for a partition that does not fit the layers.
    """
    context, named = context_if_launched(), named_layers(layers)
    size, rank = (1, 0) if context is None else (context.pipeline_size, context.pipeline_rank)
    placement = Placement.linear(size) if placement is None else placement
    if placement.num_ranks != size:
        raise UsageError(f"the placement is for {placement.num_ranks} ranks, the pipeline has {size}")
    parts = cut_layers(layers, placement.num_stages, partition)
    names, chunks = list(named), nn.ModuleList()
    for stage in placement.stages_of(rank):
        own = names[slice(*parts[stage])]
        made = OrderedDict((name, _made(name, named[name], seed)) for name in own)
        chunks.append(nn.Sequential(made))
        if context is None or (context.data_rank, context.tensor_rank) == (0, 0):
            count = sum(_sizes(chunks[-1]).values())
            LOG.info("number of parameters: %d on pipeline stage %d (layers %s to %s)", count, stage, own[0], own[-1])
    _tie(list(named.values()), parts, placement, rank)
    return chunks


def cut_layers(layers: Layers, num_stages: int, partition: Partition = "uniform") -> list[Part]:
    """The part `(start, end)` of each stage, as `build_stages` cuts it. Raises UsageError as it does."""
    named = named_layers(layers)
    if isinstance(partition, LayerCosts):
        partition = partition.weights
    elif isinstance(partition, str) and partition == "parameters":
        partition = [sum(_sizes(_described(name, layer)).values()) for name, layer in named.items()]
    elif isinstance(partition, str) and partition != "uniform":
        raise UsageError(
            'partition is "uniform", "parameters", what measure_layers returns, a list of weights, one a layer, or a '
            f"list of pairs (start, end), one a stage; got {partition!r}"
        )
    return stage_parts(len(named), num_stages, partition)


def _made(name: str, layer: Layer, seed: int | None) -> nn.Module:
    with nullcontext() if seed is None or isinstance(layer, nn.Module) else drawing_from(f"{seed}/{name}"):
        return make_layer(name, layer)


def _described(name: str, layer: Layer) -> nn.Module:
    """A layer whose parameters have shapes, but no memory where it had to be made."""
    with torch.device("meta"):
        made = make_layer(name, layer)
    if any(map(is_lazy, made.parameters())):
        raise UsageError(f"layer {name} has parameters without a shape yet: run it once, or cut by a list of weights")
    return made


def _sizes(module: nn.Module) -> Mapping[int, int]:
    """How many numbers each parameter has, over all tensor ranks, by its id."""
    splits = splits_of(module)
    return {
        id(parameter): 0 if is_lazy(parameter) else prod(whole_shape(parameter, splits.get(id(parameter))))
        for parameter in module.parameters()
    }


def _tie(layers: Sequence[Layer], parts: Sequence[Part], placement: Placement, rank: int) -> None:
    """Ties what layers share that lie in different stages, where these are on several ranks."""
    for parameter, stages in _shared(layers, parts):
        ranks = sorted({holder for stage in stages for holder in placement.ranks_of(stage)})
        if rank in ranks and len(ranks) > 1:
            PipelineSharedModuleWrapper(ranks).register_parameter(parameter)


def _shared(layers: Sequence[Layer], parts: Sequence[Part]) -> Iterator[tuple[nn.Parameter, set[int]]]:
    """The parameters that several stages have, and which: in the same order on every rank."""
    found: dict[nn.Parameter, set[int]] = defaultdict(set)
    for stage, (start, end) in enumerate(parts):
        for layer in layers[start:end]:
            for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                found[parameter].add(stage)
    return ((parameter, stages) for parameter, stages in found.items() if len(stages) > 1)
