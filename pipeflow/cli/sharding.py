"""The options of `pipeflow plan` that say what replicas divide, and which program keeps it."""

from __future__ import annotations

import argparse

from pipeflow.planning.engines import ENGINES
from pipeflow.planning.setup import ZERO


def add_sharding(group: argparse._ArgumentGroup) -> None:
    """Adds the options to a group of a command."""
    add = group.add_argument
    zero = "split over the replicas: 1 (or no value) the optimizer's state, 2 gradients, too, 3 weights, too (FSDP)"
    add("--zero", type=int, choices=ZERO, nargs="?", const=1, help=f"{zero}; default: 0")
    shards = "split what --zero says over N replicas, such as those of a node, not over all of them"
    add("--shard-ranks", type=int, metavar="N", help=shards)
    prefetch = "with --zero 3, gather a layer while the backward before it computes"
    add("--prefetch", action="store_true", help=prefetch)
    once = "with --zero 3, keep gradients whole and reduce them once, not in every microbatch (no_sync)"
    add("--reduce-once", action="store_true", default=None, help=once)
    overlap = "reduce gradients and gather weights while layers compute (default: with --zero 3, in fp8 and *-mixed)"
    add("--overlap", action=argparse.BooleanOptionalAction, help=overlap)
    engine = "count what this program keeps, and compute as it does (default: as --for)"
    add("--engine", choices=ENGINES, help=engine)
