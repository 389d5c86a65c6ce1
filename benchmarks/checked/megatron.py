"""Megatron-LM's own layers on two tensor ranks, which take the weights of a plain model. It needs megatron-core."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from pipeflow.checking import keep_weights, record, take_weights

RANKS, STEPS, RATE = 2, 2, 1e-3
WORDS, WIDTH = 32, 16


class Model(nn.Module):
    """An embedding, one block of two layers, and a head; layers of Megatron-LM return a bias, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up: Any = nn.Linear(WIDTH, 4 * WIDTH)
        self.down: Any = nn.Linear(4 * WIDTH, WIDTH)
        self.head: Any = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        values = self.embed(words)
        values = values + _output(self.down(F.gelu(_output(self.up(self.norm(values))))))
        logits: Tensor = _output(self.head(values))
        return logits


def _output(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def batches() -> tuple[Tensor, Tensor]:
    """Words and labels of all steps."""
    words = torch.randint(WORDS, (STEPS, 4, 9), generator=torch.Generator().manual_seed(1))
    return words[..., :-1], words[..., 1:]


def plain(folder: Path) -> Path:
    """The reference, whose weights are kept."""
    torch.manual_seed(0)
    made = Model()
    keep_weights(folder, made)
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    words, labels = batches()
    with record(folder, made):
        for step in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(made(words[step]).flatten(0, 1), labels[step].flatten()).backward()
            optimizer.step()
    return folder


def run(folder: str, reference: str, fault: str = "") -> None:
    """A recorded run on this rank."""
    core, tensor_parallel = (import_module(f"megatron.core.{name}") for name in ("parallel_state", "tensor_parallel"))
    configs = import_module("megatron.core.model_parallel_config")
    core.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    config = configs.ModelParallelConfig(
        tensor_model_parallel_size=RANKS, use_cpu_initialization=True, params_dtype=torch.float32
    )
    options: dict[str, Any] = {"config": config, "init_method": nn.init.normal_}
    made = Model()
    made.embed = tensor_parallel.VocabParallelEmbedding(WORDS, WIDTH, **options)
    made.up = tensor_parallel.ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **options)
    made.down = tensor_parallel.RowParallelLinear(
        4 * WIDTH, WIDTH, bias=True, input_is_parallel=True, skip_bias_add=False, **options
    )
    made.head = tensor_parallel.ColumnParallelLinear(WIDTH, WORDS, bias=False, gather_output=False, **options)
    take_weights(reference, made)
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    words, labels = batches()
    with record(Path(folder), made):
        for step in range(STEPS):
            optimizer.zero_grad()
            logits = made(words[step]).transpose(0, 1).contiguous()
            losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels[step].t().contiguous())
            losses.mean().backward()
            if fault == "scale":
                made.up.weight.grad *= RANKS
            optimizer.step()
