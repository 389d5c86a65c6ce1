"""Outputs: what the last stage made, for the ranks that hold it, put together from its microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch.utils._pytree import tree_unflatten

from pipeflow.core.dataflow import Content, Value
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.runtime.microbatch import merge
from pipeflow.runtime.program.cells import Cell, Results, flatten
from pipeflow.runtime.program.described import Arrival, Lanes, PostDescribed, SendDescribed, WaitDescribed
from pipeflow.runtime.program.operations import Operation
from pipeflow.runtime.program.running import run
from pipeflow.runtime.program.transfers import Release


def merged(results: Results, transport: Transport, last: Sequence[int], stage: int) -> object:
    """The last stage's outputs as one; None where they are not kept. `last` are the ranks that have the last `stage`:
    two of them give each other what each has.
    """
    if not results.keep_outputs:
        return None
    for peer in last:
        if peer != transport.rank:
            _exchange(results, transport, peer, stage)
    return merge(results.outputs)


def _exchange(results: Results, transport: Transport, peer: int, stage: int) -> None:
    sending, receiving = Lanes.sending(transport, peer), Lanes.receiving(transport, peer)
    link, inbox = transport.link(peer), deque[Arrival]()
    posts, sends, waits, releases = [list[Operation]() for _ in range(4)]
    arriving: dict[int, Cell] = {}
    for microbatch, output in enumerate(results.outputs):
        value, cell = Value(Content.ACTIVATION, stage, microbatch), Cell()
        if output is None:
            arriving[microbatch] = cell
            arrival = Arrival(cell, receiving, transport.device)
            posts.append(PostDescribed(value, link, arrival, inbox))
            waits.append(WaitDescribed(value, link, arrival, inbox))
        else:
            tensors, cell.spec = flatten(output, transport.device)
            cell.tensors = [tensor.contiguous() for tensor in tensors]
            sends.append(SendDescribed(value, link, cell, sending))
            releases.append(Release(value, link, cell))
    run([*posts, *sends, *waits, *releases])
    for microbatch, cell in arriving.items():
        results.outputs[microbatch] = cell.tensors[0] if cell.spec is None else tree_unflatten(cell.tensors, cell.spec)
