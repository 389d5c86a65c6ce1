"""Place: what accelerate is told of a rank. Its processes are replicas; files, logs and trackers are those of rank 0.
Must not contain: messages between replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor

from pipeflow.parallel.context import Context, current_context
from pipeflow.parallel.transport.agreement import all_gather


def share_place(context: Context) -> None:
    """Tells accelerate this rank's place. Its state has the rank as `process_index`, by which it logs and names files;
    that of an Accelerator is the replica. Functions take the place of methods that depend on other processes.
    """
    AcceleratorState._shared_state.clear()
    PartialState._shared_state.clear()
    PartialState._shared_state.update(
        _cpu=context.device.type == "cpu",
        backend=None,
        debug=False,
        device=context.device,
        distributed_type=DistributedType.NO,
        fork_launched=False,
        local_process_index=int(os.environ.get("LOCAL_RANK", context.rank)),
        num_processes=context.data_size,
        process_index=context.rank,
        **{function.__name__: function for function in _METHODS},
    )


def is_last_process() -> bool:
    """True on the last rank of the world."""
    context = current_context()
    return context.rank == context.world_size - 1


def is_first_of(replica: int | None) -> bool:
    """True on the first rank of a replica."""
    context = current_context()
    return context.data_rank == replica and context.pipeline_rank == context.tensor_rank == 0


def wait_for_everyone() -> None:
    """Waits until all ranks have called it."""
    context = current_context()
    with context.alarm.raised_everywhere():
        all_gather(context.world, [0.0])


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function on rank 0, and one that does nothing elsewhere."""
    return function if PartialState().is_main_process else _nothing


def on_local_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function on the first rank of each machine, and one that does nothing elsewhere."""
    return function if PartialState().is_local_main_process else _nothing


def on_last_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function on the last rank, and one that does nothing elsewhere."""
    return function if is_last_process() else _nothing


def on_process(function: Callable[..., Any] | None = None, process_index: int | None = None) -> Callable[..., Any]:
    """Returns the function on the first rank of a replica, and one that does nothing elsewhere."""
    if function is None:
        return partial(on_process, process_index=process_index)
    return function if is_first_of(process_index) else _nothing


def on_local_process(
    function: Callable[..., Any] | None = None, local_process_index: int | None = None
) -> Callable[..., Any]:
    """Returns the function on one rank of each machine, and one that does nothing elsewhere."""
    if function is None:
        return partial(on_local_process, local_process_index=local_process_index)
    return function if PartialState().local_process_index == local_process_index else _nothing


@contextmanager
def split_between_processes(inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
    """Gives each replica its part of `inputs`: a list, a tuple, a tensor, or a dict of these."""
    context = current_context()
    yield part_of(inputs, context.data_rank, context.data_size, apply_padding)


def part_of(values: Any, index: int, count: int, pad: bool) -> Any:
    """Part `index` of `count` parts of `values` in order, of which the first are one longer. With `pad`, the last value
    of all fills up the others.
    """
    if isinstance(values, Mapping):
        return {key: part_of(each, index, count, pad) for key, each in values.items()}
    size, longer = divmod(len(values), count)
    start = index * size + min(index, longer)
    length = size + (index < longer)
    where = [*range(start, start + length)] + [len(values) - 1] * (pad * (size + bool(longer) - length))
    if isinstance(values, Tensor):
        return values[where]
    if hasattr(values, "select"):  # a Dataset of the package datasets
        return values.select(where)
    return type(values)(values[each] for each in where)


def _nothing(*_: object, **__: object) -> None:
    """Takes the place of a function that runs elsewhere."""


_METHODS = (
    on_last_process,
    on_local_main_process,
    on_local_process,
    on_main_process,
    on_process,
    split_between_processes,
    wait_for_everyone,
)
