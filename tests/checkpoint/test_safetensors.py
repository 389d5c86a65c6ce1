"""Weights come from and go to safetensors files under other names, whatever the layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import (
    Pipeline,
    PipelineSharedModuleWrapper,
    Rename,
    Transform,
    UsageError,
    load_safetensors,
    make_schedule,
    save_safetensors,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from tests.checkpoint.checkpoints import Layout, Run, SplitWeight, under, wholes

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, LAYERS, WORDS, STORED = 8, 2, 4, 12, 11

GPT2 = (
    Rename("words.weight", "wte.weight", Transform.padded(stored=STORED, size=WORDS)),
    Rename("head.weight", "wte.weight", Transform.padded(stored=STORED, size=WORDS)),
    Rename(
        "blocks.{}.query_key_value.weight",
        "h.{}.attn.c_attn.weight",
        Transform.transposed().then(Transform.interleaved(HEADS)),
    ),
    Rename("blocks.{}.query_key_value.bias", "h.{}.attn.c_attn.bias", Transform.interleaved(HEADS)),
    Rename("blocks.{}.output.weight", "h.{}.mlp.c_proj.weight", Transform.transposed()),
)


def gpt2() -> dict[str, Tensor]:
    """Weights in GPT-2's names and shapes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"wte.weight": torch.randn(STORED, HIDDEN, generator=generator)}
    for layer in range(LAYERS):
        tensors[f"h.{layer}.attn.c_attn.weight"] = torch.randn(HIDDEN, 3 * HIDDEN, generator=generator)
        tensors[f"h.{layer}.attn.c_attn.bias"] = torch.randn(3 * HIDDEN, generator=generator)
        tensors[f"h.{layer}.mlp.c_proj.weight"] = torch.randn(4 * HIDDEN, HIDDEN, generator=generator)
    return tensors


class Block(nn.Module):
    """What of a GPT's layer shows how weights are laid out; the first weight is split over the tensor ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = SplitWeight(torch.zeros(3 * HIDDEN, HIDDEN), 0)
        self.query_key_value.bias = nn.Parameter(torch.zeros(3 * HIDDEN))
        self.output = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)


class Stage(nn.Module):
    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        zeros = torch.zeros(WORDS, HIDDEN)
        self.words = SplitWeight(zeros, 0) if start == 0 else None
        self.blocks = nn.ModuleDict({str(layer): Block() for layer in range(start, end)})
        self.head = SplitWeight(zeros, 0) if end == LAYERS else None
        if self.words is not None and self.head is not None:
            self.head.weight = self.words.weight


def build() -> Pipeline:
    context = current_context()
    ranks, rank = context.pipeline_size, context.pipeline_rank
    stage = Stage(LAYERS * rank // ranks, LAYERS * (rank + 1) // ranks)
    shared = PipelineSharedModuleWrapper([0, ranks - 1])
    if ranks > 1 and (ends := stage.words or stage.head):
        shared.register_module(ends)
    return Pipeline(stage, make_schedule("gpipe", ranks=ranks, microbatches=1))


def load_and_save(source: Path, target: Path, shard_bytes: int) -> dict[str, Tensor]:
    model = build()
    load_safetensors(source, model, GPT2)
    save_safetensors(target, model, GPT2, shard_bytes=shard_bytes)
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, SplitWeight):
            weights[name.split(".", 2)[2] + ".weight"] = module.whole().detach()
    return weights


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("layout", "shard_bytes", "run"),
    [
        ((1, 1, 1), 10**9, run_threads),
        ((2, 2, 1), 10**9, run_threads),
        ((2, 2, 1), 1500, run_threads),
        ((2, 3, 2), 1500, run_threads),
        ((1, 2, 1), 1500, run_processes),
    ],
)
def test_weights_come_and_go_with_the_same_bits(tmp_path: Path, layout: Layout, shard_bytes: int, run: Any) -> None:
    theirs = gpt2()
    save_file(theirs, tmp_path / "model.safetensors")
    for weights in under(layout, load_and_save, tmp_path, tmp_path / "out", shard_bytes, run=run):
        for name in weights.keys() & {"words.weight", "head.weight"}:
            assert torch.equal(weights[name], functional.pad(theirs["wte.weight"], (0, 0, 0, 1)))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    written: dict[str, Tensor] = {}
    for file in files:
        part = load_file(file)
        assert not part.keys() & written
        written |= part
        if len(files) > 1:
            assert sum(tensor.nbytes for tensor in part.values()) <= shard_bytes or len(part) == 1
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], theirs[name]) for name in theirs)
    if shard_bytes == 10**9:
        assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in theirs.values())
        assert all(name in load_file(tmp_path / "out" / file) for name, file in index["weight_map"].items())
        under((4, 1, 1), load_and_save, tmp_path / "out", tmp_path / "again", 10**9)
        under((1, 1, 1), load_and_save, tmp_path / "again", tmp_path / "again", 10**9)
        assert [file.name for file in (tmp_path / "again").iterdir()] == ["model.safetensors"]


def test_heads_that_are_interleaved_attend_as_before() -> None:
    """Scores by GPT-2's layout, [Q; K; V], and by one that has every head's together."""
    stored = torch.randn(HIDDEN, 3 * HIDDEN, dtype=torch.float64)
    hidden = torch.randn(5, HIDDEN, dtype=torch.float64)
    query, key, _ = (each.view(5, HEADS, -1) for each in (hidden @ stored).chunk(3, dim=1))
    ours = Transform.transposed().then(Transform.interleaved(HEADS)).to_ours(stored)
    mixed = functional.linear(hidden, ours).view(5, HEADS, 3, -1)
    expected = torch.einsum("qhd,khd->hqk", query, key)
    torch.testing.assert_close(torch.einsum("qhd,khd->hqk", mixed[:, :, 0], mixed[:, :, 1]), expected)


def same_names(path: Path, *, loads: bool) -> dict[str, Any]:
    run = Run()
    if loads:
        load_safetensors(path, run.pipeline)
    else:
        run.train(1)
        save_safetensors(path, run.pipeline)
    return run.pieces()


def test_parts_of_split_weights_are_read_alone(tmp_path: Path) -> None:
    before = wholes(under((2, 2, 1), lambda: same_names(tmp_path, loads=False)))
    after = wholes(under((1, 4, 1), lambda: same_names(tmp_path, loads=True)))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_errors_are_clear_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    file = tmp_path / "model.safetensors"
    with pytest.raises(UsageError, match=r"has no weights: pass a .safetensors file, or a folder"):
        load_safetensors(tmp_path, model)
    file.write_bytes(b"no such thing")
    with pytest.raises(UsageError, match=f"{file} is damaged or missing"):
        load_safetensors(file, model)
    stored = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    save_file(stored | {"1.weight": torch.zeros(3, 2)}, file)
    with pytest.raises(
        UsageError, match=r"'1.weight' in .* has shape \(3, 2\), which does not fit .* of shape \(2, 3\)"
    ):
        load_safetensors(file, model)
    del stored["1.bias"]
    save_file(stored, file)
    with pytest.raises(UsageError, match=r"lacks 1 weights of the model: 'h.1.bias' for '1.bias'; pass rename"):
        load_safetensors(file, model, [Rename("1.bias", "h.1.bias"), Rename("{}.bias", "{}.bias")])
    with pytest.raises(UsageError, match=r"'0.weight' and '0.bias' would both be written as 'it'"):
        save_safetensors(tmp_path / "out", model, [Rename("0.weight", "it"), Rename("0.bias", "it")])
    with pytest.raises(UsageError, match=r"the same number of \{\}"):
        Rename("{}.weight", "weight")
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match="pip install safetensors"):
        load_safetensors(file, model)
