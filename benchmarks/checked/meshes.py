"""DTensors: tensor parallelism whose norms have parts of the sequence, and `fully_shard` in mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.checked.llama import SIZES, STEPS, Sizes, batches, count, model, optimizer_of, total_loss
from pipeflow.checking import record

RANKS = 2


def _parallel(made: Any, mesh: DeviceMesh) -> None:
    """Sequence parallel norms, and layers that are split between them, as torch's tutorial has it."""
    top: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(made, mesh, top)
    for layer in made.layers.values():
        plan: dict[str, Any] = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        for owner, inner, last in (("attention", ("wq", "wk", "wv"), "wo"), ("feed", ("w1", "w3"), "w2")):
            plan[owner] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {f"{owner}.{name}": ColwiseParallel() for name in inner}
            plan[f"{owner}.{last}"] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(layer, mesh, plan)


def tensor(folder: str, fault: str = "", sizes: Sizes = SIZES) -> None:
    """A recorded run of two tensor ranks."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    made: Any = model(sizes)
    _parallel(made, mesh)
    layer = made.layers["1"]
    with torch.no_grad():
        if fault == "own initial values" and rank:
            layer.attention.wq.weight.to_local().normal_(0.0, 0.1)
        if fault == "exchanged heads":
            whole = layer.attention.wv.weight.full_tensor()
            layer.attention.wv.weight.to_local().copy_(whole.chunk(RANKS)[1 - rank])
        if fault == "interleaved heads":
            whole = layer.attention.wq.weight.full_tensor()
            layer.attention.wq.weight.to_local().copy_(whole.unflatten(0, (-1, RANKS, 6)).unbind(1)[rank].flatten(0, 1))
    if fault == "wrong ranks of the sequence":
        layer.norm2.register_forward_hook(lambda _, __, output: _exchanged(output, rank))
    optimizer = optimizer_of(made)
    words, labels = batches(sizes)
    with record(Path(folder), made):
        for step in range(STEPS):
            optimizer.zero_grad()
            (total_loss(made(words[step]), labels[step]) / count(labels[step])).backward()
            if fault == "norm of a part":
                own: Any = layer.norm1.weight.grad
                layer.norm1.weight.grad = DTensor.from_local(own.to_local(), mesh, [Replicate()], run_check=False)
            optimizer.step()


def _exchanged(output: Any, rank: int) -> Any:
    """The other rank's part of the sequence."""
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    parts = whole.chunk(RANKS, 1)
    return DTensor.from_local(parts[1 - rank].contiguous(), output.device_mesh, [Shard(1)])


def mixed(folder: str, fault: str = "", sizes: Sizes = SIZES) -> None:
    """A recorded run of replicas whose forward is in bfloat16, with float32 weights; one rank is the reference."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    made: Any = model(sizes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in made.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(made, mesh=mesh, mp_policy=policy)
    optimizer = optimizer_of(made)
    words, labels = batches(sizes)
    with record(Path(folder), made, optimizer):
        for step in range(STEPS):
            mine = slice(rank * sizes.batch // ranks, (rank + 1) * sizes.batch // ranks)
            if fault == "overlapping samples":
                mine = slice(rank, rank + sizes.batch // ranks)
            optimizer.zero_grad()
            loss = total_loss(made(words[step, mine]), labels[step, mine])
            (loss * ranks / count(labels[step])).backward()
            for parameter in made.layers["1"].parameters() if fault == "sum for a mean" else ():
                parameter.grad *= RANKS  # as set_gradient_divide_factor(1.0), which gloo lacks
            optimizer.step()


def clipped(folder: str, fault: str = "", sizes: Sizes = SIZES) -> None:
    """As `mixed` in float32, whose gradients are clipped by their norm, or by that of the rank's own shards."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    made: Any = model(sizes)
    fully_shard(made, mesh=mesh)
    optimizer = optimizer_of(made)
    words, labels = batches(sizes)
    mine = slice(rank * sizes.batch // ranks, (rank + 1) * sizes.batch // ranks)
    with record(Path(folder), made, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            (total_loss(made(words[step, mine]), labels[step, mine]) * ranks / count(labels[step])).backward()
            if fault == "own shards":
                _clip_own(made)
            else:
                nn.utils.clip_grad_norm_(made.parameters(), 0.05)
            optimizer.step()


def _clip_own(made: nn.Module) -> None:
    """Each rank clips by the norm of its own shards."""
    own: list[Tensor] = [each.grad.to_local() for each in made.parameters() if each.grad is not None]  # type: ignore[attr-defined]  # DTensors
    factor = min(1.0, 0.05 / float(torch.stack([each.square().sum() for each in own]).sum().sqrt()))
    for each in own:
        each.mul_(factor)
