"""Outputs: puts the last stage's outputs together from its microbatches, on the ranks that hold that stage."""

from __future__ import annotations

from collections import deque

from pipeflow.core.dataflow import Content, Value
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.transport.protocol import Transport
from pipeflow.engine.runtime.microbatch import merge
from pipeflow.engine.runtime.program.operations import Doing, Operation, run
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.program.slots import Slot, flatten
from pipeflow.engine.runtime.program.wires import LearnedChannels, LearnedWire
from pipeflow.engine.torch_private.trees import tree_unflatten


def merged(results: Results, transport: Transport, placement: Placement) -> object:
    """The merged outputs of the last stage, or None if they are not kept. If several ranks hold it, they exchange their
    outputs.
    """
    if not results.keep_outputs:
        return None
    stage = placement.num_stages - 1
    peers = [rank for rank in placement.ranks_of(stage) if rank != transport.rank]
    posts, sends, waits, releases = [list[Operation]() for _ in range(4)]
    arriving: dict[int, Slot] = {}
    for peer in peers:
        ends = (transport.rank, peer), (peer, transport.rank)
        transport.connect([channel for each in ends for channel in LearnedChannels.between(*each)])
        sending, receiving = LearnedChannels.sending(transport, peer), LearnedChannels.receiving(transport, peer)
        link, device, inbox = transport.link(peer), transport.device, deque[LearnedWire]()
        for microbatch, output in enumerate(results.outputs):
            value, slot = Value(Content.ACTIVATION, stage, microbatch), Slot()
            holder = placement.rank_of(stage, microbatch)
            if holder == peer:
                arriving[microbatch] = slot
                wire = LearnedWire(value, slot, link, device, receiving, inbox)
                posts.append(Operation(wire.post, Doing.POST, value, wire))
                waits.append(Operation(wire.wait, Doing.WAIT, value, wire))
            elif holder == transport.rank:
                tensors, slot.spec = flatten(output, device)
                slot.tensors = [tensor.contiguous() for tensor in tensors]
                wire = LearnedWire(value, slot, link, device, sending, inbox)
                sends.append(Operation(wire.send, Doing.SEND, value, wire))
                releases.append(Operation(wire.release, Doing.RELEASE, value, wire))
    run([*posts, *sends, *waits, *releases])
    for microbatch, slot in arriving.items():
        tensors, spec = slot.tensors, slot.spec
        results.outputs[microbatch] = tensors[0] if spec is None else tree_unflatten(tensors, spec)
    return merge(results.outputs, sizes=results.sizes)
