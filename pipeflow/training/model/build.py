"""build_stages: makes this rank's stages of a model given as a list of layers. Must not contain: how layers are
measured, or how stages run.
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
from pipeflow.core.partition import Cut, Part, stage_parts
from pipeflow.core.placement import Placement
from pipeflow.parallel.context import context_if_launched
from pipeflow.parallel.sharding import splits_of
from pipeflow.planning.layer_costs import LayerCosts
from pipeflow.runtime.gradients.ties import PipelineSharedModuleWrapper
from pipeflow.tensor.division import whole_shape
from pipeflow.training.model.layers import Layer, Layers, drawing_from, make_layer, named_layers

LOG = logging.getLogger("pipeflow")
Partition = Cut | Literal["parameters"] | LayerCosts


def build_stages(
    layers: Layers, placement: Placement | None = None, *, partition: Partition = "uniform", seed: int | None = None
) -> nn.ModuleList:
    """Makes this rank's stages of a model given as a list of layers. Returns one nn.Sequential per chunk, in order, to
    be passed to `Pipeline`. Layers keep the names that they have in the whole nn.Sequential, so parameters and
    checkpoints have the same names under any layout.

    Args:
        layers: an nn.Sequential, or a list of modules and of callables that make them, such as
            `functools.partial(Block, width)`. A rank calls only the callables of its own stages. Each layer takes one
            argument, the output of the layer before it.
        placement: the schedule's placement; by default one stage per rank. Without a launch there is one rank.
        partition: where to cut; the same on all ranks. "uniform" gives each stage the same number of layers (as nearly
            as possible). "parameters" balances the number of parameters, the result of `measure_layers(...)` balances
            the time, and a list with one weight per layer balances the weights. Each of these makes the largest stage
            as small as possible. A list of pairs `(start, end)`, one per stage, sets the stages.
        seed: callables draw initial weights from this seed and the layer's name, so weights are the same under any
            layout. By default they draw from torch's default generator.

    If layers of several stages share a parameter object, it is tied over the ranks of these stages, as
    PipelineSharedModuleWrapper does. The logger "pipeflow" logs the number of parameters of each stage.

    Raises UsageError if `layers` is not a list of layers, or if the placement does not fit the ranks. Also raises it if
    there are fewer layers than stages, or if the partition does not fit the layers.
    """
    context, named = context_if_launched(), named_layers(layers)
    size, rank = (1, 0) if context is None else (context.pipeline_size, context.pipeline_rank)
    placement = Placement.linear(size) if placement is None else placement
    if placement.num_ranks != size:
        raise UsageError(f"the placement is for {placement.num_ranks} ranks, but the pipeline has {size}")
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
    """Returns the range of layers `(start, end)` of each stage, as `build_stages` cuts them.

    Args:
        layers, partition: as in `build_stages`.
        num_stages: number of stages of the whole model.

    Raises UsageError as `build_stages` does.
    """
    named = named_layers(layers)
    if isinstance(partition, LayerCosts):
        partition = partition.weights
    elif isinstance(partition, str) and partition == "parameters":
        partition = [sum(_sizes(_described(name, layer)).values()) for name, layer in named.items()]
    elif isinstance(partition, str) and partition != "uniform":
        raise UsageError(
            'partition must be "uniform", "parameters", the result of measure_layers, a list of weights (one per '
            f"layer), or a list of pairs (start, end), one per stage; got {partition!r}"
        )
    return stage_parts(len(named), num_stages, partition)


def _made(name: str, layer: Layer, seed: int | None) -> nn.Module:
    with nullcontext() if seed is None or isinstance(layer, nn.Module) else drawing_from(f"{seed}/{name}"):
        return make_layer(name, layer)


def _described(name: str, layer: Layer) -> nn.Module:
    """The layer as a module; if it has to be made, its parameters are on the meta device."""
    with torch.device("meta"):
        made = make_layer(name, layer)
    if any(map(is_lazy, made.parameters())):
        raise UsageError(f"layer {name} has lazy parameters without a shape: run it once, or cut by a list of weights")
    return made


def _sizes(module: nn.Module) -> Mapping[int, int]:
    """Number of elements of each whole parameter (over all tensor ranks), by the parameter's id."""
    splits = splits_of(module)
    return {
        id(parameter): 0 if is_lazy(parameter) else prod(whole_shape(parameter, splits.get(id(parameter))))
        for parameter in module.parameters()
    }


def _tie(layers: Sequence[Layer], parts: Sequence[Part], placement: Placement, rank: int) -> None:
    """Ties parameters that stages on several ranks share."""
    for parameter, stages in _shared(layers, parts):
        ranks = sorted({holder for stage in stages for holder in placement.ranks_of(stage)})
        if rank in ranks and len(ranks) > 1:
            PipelineSharedModuleWrapper(ranks).register_parameter(parameter)


def _shared(layers: Sequence[Layer], parts: Sequence[Part]) -> Iterator[tuple[nn.Parameter, set[int]]]:
    """The parameters that several stages share, each with these stages, in the same order on every rank."""
    found: dict[nn.Parameter, set[int]] = defaultdict(set)
    for stage, (start, end) in enumerate(parts):
        for layer in layers[start:end]:
            for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                found[parameter].add(stage)
    return ((parameter, stages) for parameter, stages in found.items() if len(stages) > 1)
