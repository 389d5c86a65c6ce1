"""Outputs: puts the last stage's outputs together from its microbatches, on the ranks that hold that stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch.utils._pytree import tree_unflatten

from pipeflow.core.dataflow import Content, Value
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.runtime.microbatch import merge
from pipeflow.runtime.program.dynamic_shapes import Arrival, DynamicChannels, PostDynamic, SendDynamic, WaitDynamic
from pipeflow.runtime.program.operations import Operation
from pipeflow.runtime.program.payload import Payload, flatten
from pipeflow.runtime.program.results import Results
from pipeflow.runtime.program.running import run
from pipeflow.runtime.program.transfers import ReleaseSent


def merged(results: Results, transport: Transport, last: Sequence[int], stage: int) -> object:
    """The merged outputs of the last stage, or None if they are not kept.

    `last` are the ranks that hold the last stage, whose index is `stage`. If there are two, they exchange their
    outputs.
    """
    if not results.keep_outputs:
        return None
    for peer in last:
        if peer != transport.rank:
            _exchange(results, transport, peer, stage)
    return merge(results.outputs)


def _exchange(results: Results, transport: Transport, peer: int, stage: int) -> None:
    outgoing, incoming = (DynamicChannels.between(*ends) for ends in ((transport.rank, peer), (peer, transport.rank)))
    transport.connect([*outgoing, *incoming])
    sending, receiving = DynamicChannels.sending(transport, peer), DynamicChannels.receiving(transport, peer)
    link, inbox = transport.link(peer), deque[Arrival]()
    posts, sends, waits, releases = [list[Operation]() for _ in range(4)]
    arriving: dict[int, Payload] = {}
    for microbatch, output in enumerate(results.outputs):
        value, payload = Value(Content.ACTIVATION, stage, microbatch), Payload()
        if output is None:
            arriving[microbatch] = payload
            arrival = Arrival(payload, receiving, transport.device)
            posts.append(PostDynamic(value, link, arrival, inbox))
            waits.append(WaitDynamic(value, link, arrival, inbox))
        else:
            tensors, payload.spec = flatten(output, transport.device)
            payload.tensors = [tensor.contiguous() for tensor in tensors]
            sends.append(SendDynamic(value, link, payload, sending, transport.device))
            releases.append(ReleaseSent(value, link, payload))
    run([*posts, *sends, *waits, *releases])
    for microbatch, payload in arriving.items():
        tensors, spec = payload.tensors, payload.spec
        results.outputs[microbatch] = tensors[0] if spec is None else tree_unflatten(tensors, spec)
