"""measure_layers: measures the time of each layer of a model on the device that will run it. Must not contain: how the
times are used.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.parallel.context import context_if_launched
from pipeflow.parallel.device import synchronize
from pipeflow.parallel.transport.agreement import all_gather_object
from pipeflow.planning.layer_costs import LayerCosts
from pipeflow.runtime.program.saved import storages
from pipeflow.training.model.layers import Layers, make_layer, named_layers, random_state_kept

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
        first = context.pipeline_rank == 0 and context.data_rank == 0  # all tensor ranks of it: they compute together
        costs = _measured(layers, example, runs, context.device, clock) if first else None
        told: Any = all_gather_object(context.world, None if costs is None else _rows(costs))[0]
        return _costs(*map(tuple, told), clock=clock)


def _rows(costs: LayerCosts) -> list[list[float]]:
    """The costs as lists, to be sent to other ranks."""
    return [list(getattr(costs, column.name)) for column in fields(costs) if column.name != "unit"]


def _costs(*columns: tuple[float, ...], clock: Clock) -> LayerCosts:
    forward, backward_input, backward_weight, output_bytes, *memory = columns
    unit = "s" if clock is time.perf_counter else ""
    return LayerCosts(forward, backward_input, backward_weight, output_bytes, unit, *memory)


def _after_work(clock: Clock, device: torch.device) -> float:
    """The time when the device has finished its work."""
    synchronize(device)
    return clock()


class _Times(NamedTuple):
    """Times of one run of one layer."""

    forward: float
    backward_input: float
    backward: float  # whole


def _measured(layers: Layers, example: Any, runs: int, device: torch.device, clock: Clock) -> LayerCosts:
    now = partial(_after_work, clock, device)
    if any(tensor.is_meta for tensor in _tensors(example)):
        raise UsageError("the example is on the meta device, where nothing is computed: pass one with values")
    rows: list[tuple[float, ...]] = []
    given = kept = 0.0  # bytes of the layer's input, and those of it that the layer before saves
    value = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    with random_state_kept(), torch.enable_grad():
        for name, layer in named_layers(layers).items():
            made = copy.deepcopy(layer) if isinstance(layer, nn.Module) else make_layer(name, layer)
            made.to(device)
            times = [_run(made, value, now) for _ in range(runs + 1)][1:]
            forward, backward_input, backward = map(median, zip(*times, strict=True))
            value, saved = _saved(made, _given(value))
            size = float(sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value)))
            saves = saved.own + (max(kept, saved.of_input) if rows else 0.0)
            copy_seconds = _copy_time(int(saves), device, runs, now)
            rows.append(
                (forward, backward_input, max(0.0, backward - backward_input), size, saves, given, copy_seconds)
            )
            given, kept = size, saved.of_output
    return _costs(*zip(*rows, strict=True), clock=clock)


class _Saved(NamedTuple):
    """The bytes of the memory that a forward saves: its own, that of its input, and that of its output."""

    own: float
    of_input: float
    of_output: float


def _saved(layer: nn.Module, given: Any) -> tuple[Any, _Saved]:
    """The output of a layer, and what it saves for its backward besides weights."""
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
    return output, _Saved(float(sum(sizes.values()) - of_input - of_output), float(of_input), float(of_output))


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


def _run(layer: nn.Module, value: Any, now: Clock) -> _Times:
    """Runs the layer as in training, then with frozen weights, whose backward gives only the input's gradient."""
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    forward, backward = _forward_and_backward(layer, value, now)
    for parameter in weights:
        parameter.requires_grad_(False)
        parameter.grad = None
    _, backward_input = _forward_and_backward(layer, value, now)
    for parameter in weights:
        parameter.requires_grad_(True)
    return _Times(forward, backward_input, backward)


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

    return pytree.tree_map_only(Tensor, apart, value)


def _tensors(value: Any) -> Iterator[Tensor]:
    leaves: Sequence[object] = pytree.tree_leaves(value)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))
