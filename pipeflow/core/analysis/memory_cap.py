"""Memory caps: how much a rank may keep, in the forms in which users write it."""

from __future__ import annotations

from collections.abc import Sequence

from pipeflow.core.errors import UsageError

MemoryCap = float | Sequence[float]
"""The most activations that a rank may keep, in microbatches of its whole share of the model: one number for all ranks,
or one per rank."""


def cap_per_rank(memory_cap: MemoryCap, least: Sequence[float], name: str = "memory_cap") -> list[float]:
    """The cap of every rank. For errors, `least` is what each rank needs, and `name` that of the cap. Raises UsageError
    unless `memory_cap` is one number, or one per rank, and all are positive.
    """
    caps = list(memory_cap) if isinstance(memory_cap, Sequence) else [memory_cap] * len(least)
    if len(caps) != len(least):
        raise UsageError(f"{name} is one number, or one for each of {len(least)} ranks; got {len(caps)} of them")
    for rank, cap in enumerate(caps):
        if not cap > 0:
            raise UsageError(f"{name} must be positive, got {cap} for rank {rank}: it needs {least[rank]:g} there")
    return caps
