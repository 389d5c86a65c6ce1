"""A small model whose functions between modules matter, under five engines: faults of functions, optimizers, divisors
and scalars. On one rank, `plain` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.checked.llama import rotated
from pipeflow.checking import record

RANKS, STEPS, PARTS = 2, 2, 2  # PARTS: microbatches of a pipeline, accumulations of a replica
WORDS, WIDTH, HEADS, LENGTH, BATCH, LAYERS, RATE = 40, 16, 2, 8, 8, 2, 1e-3
NO_LABEL = -100


@dataclass(frozen=True)
class Kind:
    """What a job and its reference have in common: attention by "fused" or by "manual" functions, the activation,
    the optimizer, the clipping (0: none), label smoothing, scalars that the model gets and returns, the dtype.
    """

    attention: str = "fused"
    activation: str = "silu"
    rule: str = "adamw"
    clip: float = 0.0
    smoothing: float = 0.0
    scalars: bool = False
    dtype: torch.dtype = torch.float32


KINDS = {
    "plain": Kind(),
    "manual": Kind(attention="manual"),
    "gelu": Kind(activation="gelu"),
    "momentum": Kind(rule="sgd"),
    "clipped": Kind(clip=0.05),
    "smoothed": Kind(smoothing=0.1),
    "scalars": Kind(scalars=True),
    "coarse": Kind(dtype=torch.bfloat16),
}


class Attention(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind, self._fault = kind, ""
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        q, k, v = (w(values).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = rotated(q, int(self._fault == "queries one later")), rotated(k, 0)
        if self._fault == "detached keys":
            k = k.detach()
        scale = (WIDTH if self._fault == "other scale" else WIDTH // HEADS) ** -0.5
        if (self._kind.attention == "fused") != (self._fault == "rewritten"):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self._fault != "no mask", scale=scale)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) * scale
            first = 1 if self._fault == "mask one later" else 0
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(first), -torch.inf)
            mixed = scores.softmax(-2 if self._fault == "softmax of queries" else -1).nan_to_num() @ v
        found: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return found


class Feed(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind, self._fault = kind, ""
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        gate = self.gate(values)
        if self._kind.activation == "gelu" or self._fault == "other activation":
            gate = F.gelu(gate, approximate="tanh" if self._fault == "tanh" else "none")
        else:
            gate = F.silu(gate)
        found: Tensor = self.down(gate * self.up(values))
        return found


class Layer(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._fault = ""
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed = Attention(kind), Feed(kind)

    def forward(self, values: Tensor) -> Tensor:
        kept = values * 0.5 if self._fault == "half of the residual" else values
        if self._fault == "detached residual":
            kept = kept.detach()
        values = kept + self.attention(self.norm1(values))
        found: Tensor = values + self.feed(self.norm2(values))
        return found


class Net(nn.Module):
    """The model; the embedding, or the norm and the head, may be None, for stages. Faults are in its last layer."""

    def __init__(self, kind: Kind, fault: str) -> None:
        super().__init__()
        self._kind, self._fault = kind, fault
        self.embed: Any = nn.Embedding(WORDS, WIDTH)
        self.layers: Any = nn.ModuleDict({str(index): Layer(kind) for index in range(LAYERS)})
        self.norm: Any = nn.LayerNorm(WIDTH, 3e-2 if fault == "eps of the last norm" else 1e-5)
        self.head: Any = nn.Linear(WIDTH, WORDS)
        last: Any = self.layers[str(LAYERS - 1)]
        last._fault = last.attention._fault = last.feed._fault = fault
        if fault == "eps of a norm":
            last.norm1.eps = 3e-3

    def forward(self, values: Tensor, heat: float = 1.0) -> Any:
        values = values if self.embed is None else self.embed(values)
        for layer in self.layers.values():
            values = checkpoint(layer, values, use_reentrant=False) if self._fault == "recomputed" else layer(values)
        if self.head is None:
            return values
        logits = self.head(self.norm(values)) / heat
        if not self._kind.scalars:
            return logits
        return logits, values.square().mean() * (0.02 if self._fault == "other balance" else 0.01)


def model(kind: Kind, fault: str) -> Any:
    torch.manual_seed(3)
    made = Net(kind, fault)
    with torch.no_grad():
        for each in made.parameters():
            each.add_(0.2 * torch.randn(each.shape))
    return made.to(kind.dtype)


def stage_of(kind: Kind, fault: str, rank: int) -> Any:
    """Half of the model."""
    made = model(kind, fault)
    del made.layers[str(1 - rank)]
    if rank:
        made.embed = None
    else:
        made.norm = made.head = None
    return made


def batch() -> tuple[Tensor, Tensor]:
    """Words and labels of all steps; later samples have fewer labels."""
    words = torch.randint(WORDS, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    labels = words[..., 1:].clone()
    for sample in range(BATCH):
        labels[:, sample, LENGTH - sample // 2 :] = NO_LABEL
    return words[..., :-1], labels


def optimizer_of(made: nn.Module, kind: Kind, fault: str) -> torch.optim.Optimizer:
    """AdamW without weight decay of vectors, or SGD with momentum."""
    parameters = [*made.parameters()]
    if kind.rule == "sgd":
        return torch.optim.SGD(parameters, 1e-2, 0.8 if fault == "other momentum" else 0.9)
    vectors = 0.1 if fault == "decayed vectors" else 0.0
    groups: list[dict[str, Any]] = [
        {"params": [each for each in parameters if each.dim() > 1]},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": vectors},
    ]
    betas = (0.9, 0.999 if fault == "other beta" else 0.95)
    return torch.optim.AdamW(groups, RATE, betas, 1e-6 if fault == "other eps" else 1e-8, weight_decay=0.1)


def loss_of(output: Any, labels: Tensor, tokens: Tensor, kind: Kind, fault: str, share: float) -> Tensor:
    """The loss of some samples, whose share of the batch is given: all of them add up to that of the batch."""
    logits, more = output if kind.scalars else (output, None)
    smoothing = kind.smoothing + 0.1 * (fault == "smoothed")
    if fault == "padding counts":
        labels = torch.where(labels == NO_LABEL, 0, labels)
    divisor: Any = tokens
    if fault == "all tokens":
        divisor = BATCH * LENGTH
    if fault == "samples":
        divisor = BATCH
    found: Tensor = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", label_smoothing=smoothing
    )
    found = found / divisor
    return found if more is None else found + more * share


def plain(folder: str, kind_name: str) -> None:
    """The reference, in one process."""
    kind = KINDS[kind_name]
    made = model(kind, "")
    optimizer = optimizer_of(made, kind, "")
    words, labels = batch()
    with record(folder, made, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            tokens = (labels[step] != NO_LABEL).sum()
            given = (words[step], 2.0) if kind.scalars else (words[step],)
            loss_of(made(*given), labels[step], tokens, kind, "", 1.0).backward()
            if kind.clip:
                nn.utils.clip_grad_norm_(made.parameters(), kind.clip)
            optimizer.step()


def run(folder: str, jobs: list[tuple[str, str, str, str]]) -> None:
    """Records jobs one after the other: the names of the folder, the engine, the kind and the fault of each."""
    for name, engine, kind_name, fault in jobs:
        _run(Path(folder, name), engine, KINDS[kind_name], fault)
        dist.barrier()


def _run(folder: Path, engine: str, kind: Kind, fault: str) -> None:
    rank, (words, labels) = dist.get_rank(), batch()
    is_pipeline = engine in ("hand", "pipe")
    made = stage_of(kind, fault, rank) if is_pipeline else model(kind, fault)
    trained, tokens = ENGINES[engine][0](made), [torch.tensor(1)]
    backward = ENGINES[engine][1](trained, made, kind, fault, tokens)
    optimizer = optimizer_of(made, kind, fault)
    recorded = made if engine != "ddp" else trained
    with record(folder, recorded, optimizer):
        for step in range(STEPS):
            if not (step and (fault == "not zeroed" or (fault == "stage not zeroed" and rank == 0))):
                optimizer.zero_grad()
            tokens[0] = (labels[step] != NO_LABEL).sum()
            backward(words[step], labels[step])
            if kind.clip:
                _clip(made, kind.clip, is_pipeline, fault)
            if fault == "clipped before the sum":
                _average(made)
            optimizer.step()
            _spoil(made, optimizer, fault)


def _average(made: nn.Module) -> None:
    for each in made.parameters():
        dist.all_reduce(each.grad)
        assert each.grad is not None
        each.grad /= RANKS


def _clip(made: nn.Module, most: float, is_pipeline: bool, fault: str) -> None:
    if not is_pipeline or fault == "norm of a stage":
        nn.utils.clip_grad_norm_(made.parameters(), most)
        return
    square = nn.utils.get_total_norm([each.grad for each in made.parameters() if each.grad is not None]).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(made.parameters(), most, square.sqrt())


def _spoil(made: Any, optimizer: Any, fault: str) -> None:
    """What a resuming loses of the optimizer's state."""
    for name, each in made.named_parameters():
        if fault == "moments lost" or (fault == "one moment lost" and "layers.1.feed.up" in name):
            for key in ("exp_avg", "exp_avg_sq"):
                if fault == "moments lost" or (dist.get_rank() == 0 and key == "exp_avg"):
                    moment = optimizer.state[each][key]
                    (moment.to_local() if hasattr(moment, "to_local") else moment).zero_()


Backward = Callable[[Tensor, Tensor], None]


def _replicas(trained: Any, made: Any, kind: Kind, fault: str, tokens: list[Tensor]) -> Backward:
    """Two accumulations on each of two replicas, whose gradients are averaged."""
    times = float(RANKS) if fault != "replicas twice" else 1.0

    def backward(words: Tensor, labels: Tensor) -> None:
        mine = slice(dist.get_rank() * BATCH // RANKS, (dist.get_rank() + 1) * BATCH // RANKS)
        pairs = [*zip(words[mine].chunk(PARTS), labels[mine].chunk(PARTS), strict=True)]
        for index, (given, wanted) in enumerate(pairs):
            last = index == PARTS - 1 and fault != "clipped before the sum"
            with nullcontext() if last or not hasattr(trained, "no_sync") else trained.no_sync():
                heat = (3.0 if fault == "other heat" else 2.0,) if kind.scalars else ()
                loss = loss_of(trained(given, *heat), wanted, tokens[0], kind, fault, 1 / RANKS / PARTS)
                (loss * times).backward()

    return backward


def _whole(trained: Any, made: Any, kind: Kind, fault: str, tokens: list[Tensor]) -> Backward:
    """All samples on each rank."""

    def backward(words: Tensor, labels: Tensor) -> None:
        loss_of(trained(words), labels, tokens[0], kind, fault, 1.0).backward()

    return backward


def _by_hand(trained: Any, made: Any, kind: Kind, fault: str, tokens: list[Tensor]) -> Backward:
    """Two stages that send and receive."""

    def backward(words: Tensor, labels: Tensor) -> None:
        for given, wanted in zip(words.chunk(PARTS), labels.chunk(PARTS), strict=True):
            if dist.get_rank() == 0:
                hidden = trained(given)
                dist.send(hidden.detach(), 1)
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, 1)
                hidden.backward(gradient)
                continue
            hidden = torch.empty(*given.shape, WIDTH, dtype=kind.dtype)
            dist.recv(hidden, 0)
            loss = loss_of(trained(hidden.requires_grad_()), wanted, tokens[0], kind, fault, 1 / PARTS)
            (loss * (PARTS if fault == "microbatches" else 1)).backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, 0)

    return backward


def _by_torch(trained: Any, made: Any, kind: Kind, fault: str, tokens: list[Tensor]) -> Backward:
    """Torch's 1F1B."""

    def loss(output: Any, wanted: Tensor) -> Tensor:
        return loss_of(output, wanted, tokens[0], kind, fault, 1 / PARTS) * PARTS

    stage = PipelineStage(made, dist.get_rank(), RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PARTS, loss_fn=loss)

    def backward(words: Tensor, labels: Tensor) -> None:
        if dist.get_rank() == 0:
            schedule.step(words)
        else:
            schedule.step(target=labels)

    return backward


def _sharded(made: Any) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    for layer in made.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def _divided(made: Any) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    for layer in made.layers.values():
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {"feed.gate": ColwiseParallel(), "feed.up": ColwiseParallel()}
        parallelize_module(layer, mesh, plan | {"attention.o": RowwiseParallel(), "feed.down": RowwiseParallel()})
    return made


def _same(made: Any) -> Any:
    return made


ENGINES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "ddp": (DistributedDataParallel, _replicas),
    "fsdp": (_sharded, _replicas),
    "tensor": (_divided, _whole),
    "hand": (_same, _by_hand),
    "pipe": (_same, _by_torch),
}
