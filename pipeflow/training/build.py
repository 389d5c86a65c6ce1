"""build_stages and measure_layers: this rank's stages of a model given as a list of layers, and the times by which it
can be cut. Must not contain: how stages run.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain
from math import prod
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Cut, Part, stage_parts
from pipeflow.core.placement import Placement, require_positive
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.engine.parallel.device import synchronize
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.engine.runtime.gradients.weights import PipelineSharedModuleWrapper
from pipeflow.engine.runtime.program.saved import storages
from pipeflow.engine.tensor.layer import whole_shape
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map_only
from pipeflow.planning.layer_costs import LayerCosts
from pipeflow.training.layers import Layer, Layers, drawing_from, make_layer, named_layers, random_state_kept

Clock = Callable[[], float]


def measure_layers(layers: Layers, example: Any, *, runs: int = 5, clock: Clock = time.perf_counter) -> LayerCosts:
    """Measures the cost of each layer for one microbatch: medians of several runs, in seconds, with the bytes that each
    saves for its backward and the time to copy them to the host. All ranks call it
    together and receive the measurements of the first; without a launch this process measures on the device of the
    example.

    Layers are measured one at a time, each as a copy on the rank's device that is then freed. So only the largest layer
    has to fit into memory, and the layers, their gradients and the random state stay unchanged. `torch.autocast` and
    the layers' modes (`train`, `eval`) apply as in training. The criterion is not measured.

    Args:
        layers: as in `build_stages`.
        example: one microbatch, the first layer's input.
        runs: number of measured runs per layer; one warm-up run comes before them.
        clock: function that returns the time; its unit is the unit of the result.

    Raises UsageError if `layers` is not a list of layers, or if the example is on the meta device.
    """
    require_positive(runs=runs)
    context = context_if_launched()
    if context is None:
        device = next((tensor.device for tensor in _tensors(example)), torch.device("cpu"))
        return _measured(layers, example, runs, device, clock)
    with context.alarm.raised_everywhere():
        context.alarm.expect_slow()
        first = context.pipeline_rank == 0 and context.copies.rank == 0  # all tensor ranks of it: they compute together
        costs = _measured(layers, example, runs, context.device, clock) if first else None
        told: Any = all_gather_object(context.world, None if costs is None else asdict(costs))[0]
        return LayerCosts(**told)


def _after_work(clock: Clock, device: torch.device) -> float:
    """The time when the device has finished its work."""
    synchronize(device)
    return clock()


def _measured(layers: Layers, example: Any, runs: int, device: torch.device, clock: Clock) -> LayerCosts:
    now = partial(_after_work, clock, device)
    if any(tensor.is_meta for tensor in _tensors(example)):
        raise UsageError("the example is on the meta device, where nothing is computed: pass one with values")
    rows: list[dict[str, float]] = []
    given = kept = 0.0  # bytes of the layer's input, and those of it that the layer before saves
    value = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    with random_state_kept(), torch.enable_grad():
        for name, layer in named_layers(layers).items():
            made = copy.deepcopy(layer) if isinstance(layer, nn.Module) else make_layer(name, layer)
            made.to(device)
            times = [_run(made, value, now) for _ in range(runs + 1)][1:]
            forward, backward_input, backward = map(median, zip(*times, strict=True))
            value, own, of_input, of_output = _saved(made, _given(value))
            size = float(sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value)))
            saves = own + (max(kept, of_input) if rows else 0.0)
            row = {
                "forward": forward,
                "backward_input": backward_input,
                "backward_weight": max(0.0, backward - backward_input),
                "output_bytes": size,
                "saved_bytes": saves,
                "input_bytes": given,
                "offload": _copy_time(int(saves), device, runs, now),
            }
            rows.append(row)
            given, kept = size, of_output
    columns: dict[str, Any] = {name: tuple(row[name] for row in rows) for name in rows[0]}
    return LayerCosts(**columns, unit="s" if clock is time.perf_counter else "")


def _saved(layer: nn.Module, given: Any) -> tuple[Any, float, float, float]:
    """The output of a layer, and the bytes of the memory that it saves for its backward besides weights: its own, that
    of its input, and that of its output.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(given)
    weights, inputs, outputs = map(
        storages, (chain(layer.parameters(), layer.buffers()), _tensors(given), _tensors(output))
    )
    sizes = {address: tensor.untyped_storage().nbytes() for tensor in saved for address in storages([tensor]) - weights}
    of_input = sum(size for address, size in sizes.items() if address in inputs)
    of_output = sum(size for address, size in sizes.items() if address in outputs - inputs)
    return output, float(sum(sizes.values()) - of_input - of_output), float(of_input), float(of_output)


def _copy_time(size: int, device: torch.device, runs: int, now: Clock) -> float:
    """The time to copy so many bytes from a device to its host; the median of several runs."""
    held = torch.empty(size, dtype=torch.uint8, device=device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    times = []
    for _ in range(runs + 1):
        begin = now()
        host.copy_(held, non_blocking=True)
        times.append(now() - begin)
    return median(times[1:])


def _run(layer: nn.Module, value: Any, now: Clock) -> tuple[float, float, float]:
    """Runs the layer as in training, then with frozen weights, whose backward gives only the input's gradient. Returns
    the times of the forward, of the second backward, and of the first.
    """
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    forward, backward = _forward_and_backward(layer, value, now)
    for parameter in weights:
        parameter.requires_grad_(False)
        parameter.grad = None
    _, backward_input = _forward_and_backward(layer, value, now)
    for parameter in weights:
        parameter.requires_grad_(True)
    return forward, backward_input, backward


def _forward_and_backward(layer: nn.Module, value: Any, now: Clock) -> tuple[float, float]:
    given = _given(value)
    begin = now()
    output = layer(given)
    forward = now() - begin
    ends = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    gradients = [torch.ones_like(tensor) for tensor in ends]
    begin = now()
    torch.autograd.backward(ends, gradients)
    return forward, now() - begin if ends else 0.0


def _given(value: Any) -> Any:
    """Copies of the values, detached from their graph; a layer may write into them."""

    def apart(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad).clone()

    return tree_map_only(Tensor, apart, value)


def _tensors(value: Any) -> Iterator[Tensor]:
    leaves: Sequence[object] = tree_leaves(value)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


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
        if context is None or (context.copies.rank, context.tensor_rank) == (0, 0):
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
