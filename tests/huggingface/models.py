"""Models of transformers on disk, and what serial training makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.stages.families import FAMILIES, WORDS, make

RATE = 0.05

_EXPERTS: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_EXPERTS |= {"intermediate_size": 48, "num_key_value_heads": 2, "use_cache": False, "num_experts_per_tok": 2}
_TEXT = FAMILIES["llama"][3]
MORE: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 12}, _TEXT),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
        _TEXT,
    ),
    "bert-classifier": (
        "BertForSequenceClassification",
        "BertConfig",
        {**FAMILIES["bert"][2], "num_labels": 3},
        lambda: {**_TEXT(), "labels": torch.arange(3)},
    ),
}
"""As FAMILIES. The experts of the first two lie one by one in checkpoints."""


def made(transformers: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """A model in float64 of either table, and a batch; experts compute in a way that knows float64."""
    if name not in MORE:
        return make(transformers, name)
    model, config, sizes, batch = MORE[name]
    module = getattr(transformers, model)(getattr(transformers, config)(**sizes)).double().train()
    if "num_experts_per_tok" in sizes:
        module.config._experts_implementation = "batched_mm"
    return module, batch()


def saved(module: Any, folder: Path, **options: Any) -> Path:
    """The folder, with the model in it."""
    module.save_pretrained(folder, **options)
    return folder


def trained(module: nn.Module, batch: dict[str, Any], steps: int) -> nn.Module:
    """A copy after so many steps."""
    copied = copy.deepcopy(module)
    optimizer = torch.optim.SGD(copied.parameters(), lr=RATE)
    for _ in range(steps):
        copied(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return copied


@torch.no_grad()
def logits(module: nn.Module, batch: dict[str, Any]) -> Tensor:
    """What the model says in evaluation mode."""
    found: Tensor = module.eval()(**batch).logits
    return found


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of a folder with a single file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def stored(folder: Path) -> Mapping[str, Tensor]:
    """All tensors of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    found = [load_file(file) for file in files]
    assert sum(map(len, found)) == len({name for each in found for name in each}), "a tensor is written twice"
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        assert weight_map == {name: file.name for file, each in zip(files, found, strict=True) for name in each}
    return {name: tensor for each in found for name, tensor in each.items()}
