"""Outputs: puts the last stage's outputs together from its microbatches, on the ranks that hold that stage."""

from __future__ import annotations

from collections import deque

from pipeflow.core.dataflow import Content, Value
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.transport.protocol import Transport
from pipeflow.engine.runtime.microbatch import merge
from pipeflow.engine.runtime.program.dynamic_shapes import (
    Arrival,
    DynamicChannels,
    PostDynamic,
    SendDynamic,
    WaitDynamic,
)
from pipeflow.engine.runtime.program.operations import Operation
from pipeflow.engine.runtime.program.payload import Payload, flatten
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.program.running import run
from pipeflow.engine.runtime.program.transfers import ReleaseSent
from pipeflow.engine.torch_private.trees import tree_unflatten


def merged(results: Results, transport: Transport, placement: Placement) -> object:
    """The merged outputs of the last stage, or None if they are not kept. If several ranks hold it, they exchange their
    outputs.
    """
    if not results.keep_outputs:
        return None
    stage = placement.num_stages - 1
    peers = [rank for rank in placement.ranks_of(stage) if rank != transport.rank]
    pairs = [_WithPeer(results, transport, peer, placement) for peer in peers]
    for part in ("posts", "sends", "waits", "releases"):
        run([operation for pair in pairs for operation in getattr(pair, part)])
    for pair in pairs:
        pair.take()
    return merge(results.outputs, sizes=results.sizes)


class _WithPeer:
    """The exchange of outputs with another rank that holds the last stage."""

    def __init__(self, results: Results, transport: Transport, peer: int, placement: Placement) -> None:
        ends = (transport.rank, peer), (peer, transport.rank)
        transport.connect([channel for each in ends for channel in DynamicChannels.between(*each)])
        sending, receiving = DynamicChannels.sending(transport, peer), DynamicChannels.receiving(transport, peer)
        link, inbox = transport.link(peer), deque[Arrival]()
        self.posts, self.sends, self.waits, self.releases = [list[Operation]() for _ in range(4)]
        self._results = results
        self._arriving: dict[int, Payload] = {}
        stage = placement.num_stages - 1
        for microbatch, output in enumerate(results.outputs):
            value, payload = Value(Content.ACTIVATION, stage, microbatch), Payload()
            holder = placement.rank_of(stage, microbatch)
            if holder == peer:
                self._arriving[microbatch] = payload
                arrival = Arrival(payload, receiving, transport.device)
                self.posts.append(PostDynamic(value, link, arrival, inbox))
                self.waits.append(WaitDynamic(value, link, arrival, inbox))
            elif holder == transport.rank:
                tensors, payload.spec = flatten(output, transport.device)
                payload.tensors = [tensor.contiguous() for tensor in tensors]
                self.sends.append(SendDynamic(value, link, payload, sending, transport.device))
                self.releases.append(ReleaseSent(value, link, payload))

    def take(self) -> None:
        """Puts the outputs of the peer into the results."""
        for microbatch, payload in self._arriving.items():
            tensors, spec = payload.tensors, payload.spec
            self._results.outputs[microbatch] = tensors[0] if spec is None else tree_unflatten(tensors, spec)
