"""Machine: the device of a rank: its name, its memory, and the precisions that it has units for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch

from pipeflow.engine.torch_private.tensors import has_bf16_units

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""By the names of precisions: the type of the operands of products."""


def device_name(device: torch.device, ranks: int) -> str:
    """The name of the device of one of a node's `ranks`. Processes on CPUs share the cores, so the name has their
    number.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads, cores = torch.get_num_threads(), _cores()
    return f"cpu, {_counted(ranks, 'process', 'es')} of {_counted(threads, 'thread')} on {_counted(cores, 'core')}"


def sharing(device: torch.device, ranks: int) -> float:
    """How many of a node's `ranks` share one processor. It is more than 1 if there are more threads than cores."""
    if device.type != "cpu":
        return 1.0
    return max(1.0, ranks * torch.get_num_threads() / _cores())


def runs_ahead(device: torch.device) -> bool:
    """Whether the host launches while the device computes, which a CPU cannot."""
    return device.type != "cpu"


def memory_bytes(device: torch.device, ranks: int) -> float:
    """Memory of one device, in bytes. On a machine without GPUs, each of its `ranks` has an equal part of it."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def precisions(device: torch.device) -> tuple[str, ...]:
    """The precisions that the device has units for; first the one that models are usually trained in."""
    if device.type == "cuda":
        generation = torch.cuda.get_device_capability(device)[0]
        return (*["bf16"] * (generation >= 8), *["fp16"] * (generation >= 7), *["tf32"] * (generation >= 8), "float32")
    return ("float32", *["bf16"] * (device.type == "cpu" and has_bf16_units()))


@contextmanager
def products_in(precision: str) -> Iterator[torch.dtype]:
    """Context manager that gives the type of operands whose products are computed in `precision`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield DTYPES[precision]
    finally:
        torch.set_float32_matmul_precision(before)


def _cores() -> int:
    """The number of cores that this process may use; all of them on systems that do not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _counted(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else ending}"
