"""Programs in the way of the Shardformer tutorial, with its imports: a Booster fine-tunes a classifier, and ShardFormer
without one trains ChatGLM. Nothing but the package's name is replaced, or not even that. They are equal to plain torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.scripts import run_ranks

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[2]

BOOSTED = """
import os

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.optimizer import HybridAdam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

OPTIONS = eval(os.environ["OPTIONS"])


class Sentences(Dataset):
    def __init__(self, size):
        self.words = torch.randint(3, 50, (size, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return dict(input_ids=words, attention_mask=torch.ones_like(words), labels=words.sum() % 3)


@torch.no_grad()
def evaluate(booster, model, criterion, loader):
    model.eval()
    plugin = booster.plugin
    ranks, group = plugin.pg_mesh.get_ranks_in_group(plugin.pp_group), plugin.pp_group
    right = total = 0
    for batch in loader:
        if plugin.pp_size > 1:
            found = booster.execute_pipeline(iter([batch]), model, criterion, return_loss=True, return_outputs=True)
            told = [None]
            if plugin.stage_manager.is_last_stage():
                told = [found["outputs"]["logits"].argmax(1)]
            dist.broadcast_object_list(told, src=ranks[-1], group=group)
            guess = told[0]
        else:
            guess = model(**batch).logits.argmax(1)
        right += int((guess == batch["labels"]).sum())
        total += len(guess)
    model.train()
    return right / total


def train():
    colossalai.launch_from_torch(seed=42, verbose=False)
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(**OPTIONS)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Sentences(12), batch_size=4, shuffle=False, drop_last=True)
    test_loader = plugin.prepare_dataloader(Sentences(7), batch_size=4, shuffle=False)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**eval(os.environ["SIZES"]))).double()
    decayed = [p for n, p in model.named_parameters() if "bias" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = HybridAdam(groups, lr=0.01, eps=1e-8)
    lr_scheduler = LambdaLR(optimizer, lambda step: 1 - step / 10)

    def _criterion(outputs, inputs):
        return outputs.loss

    model, optimizer, _criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=_criterion, lr_scheduler=lr_scheduler
    )
    use_pipeline = plugin.pp_size > 1
    prints = plugin.stage_manager.is_last_stage() if use_pipeline else coordinator.is_master()
    for epoch in range(2):
        model.train()
        optimizer.zero_grad()
        batches = iter(loader)
        for _ in range(len(loader)):
            if use_pipeline:
                outputs = booster.execute_pipeline(batches, model, _criterion, optimizer, return_loss=True)
                loss = outputs["loss"]
            else:
                loss = _criterion(model(**next(batches)), None)
                booster.backward(loss, optimizer)
            if prints:
                os.write(1, f"loss {loss.item()!r}\\n".encode())
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
    accuracy = evaluate(booster, model, _criterion, test_loader)
    os.write(1, f"accuracy {accuracy!r}\\n".encode())
    booster.save_model(model, "model", shard=True)


if __name__ == "__main__":
    train()
"""

SHARDED = """
import os

import colossalai
import torch
import torch.distributed as dist
from colossalai.shardformer import ShardConfig, ShardFormer
from colossalai.shardformer.modeling.chatglm2_6b.configuration_chatglm import ChatGLMConfig
from colossalai.shardformer.modeling.chatglm2_6b.modeling_chatglm import ChatGLMForConditionalGeneration, ChatGLMModel

if __name__ == "__main__":
    colossalai.launch_from_torch(verbose=False)
    torch.manual_seed(0)
    config = ChatGLMConfig(num_layers=2, padded_vocab_size=51, hidden_size=32, ffn_hidden_size=48, kv_channels=8,
                           num_attention_heads=4, multi_query_attention=True, multi_query_group_num=2)
    model = ChatGLMForConditionalGeneration(config).to(torch.device("cuda")).double()
    assert isinstance(model.model, ChatGLMModel)
    whole = sum(p.numel() for p in model.parameters())
    if dist.get_world_size() > 1:
        tp_group = dist.new_group(backend="gloo")
        shard_config = ShardConfig(tensor_parallel_process_group=tp_group, enable_tensor_parallelism=True,
                                   enable_all_optimization=True)
        model, shared_params = ShardFormer(shard_config=shard_config).optimize(model)
        assert not shared_params
        assert sum(p.numel() for p in model.parameters()) < 0.6 * whole
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    words = torch.arange(32, device="cuda").view(4, 8)
    for _ in range(4):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(1, f"loss {loss.item()!r}\\n".encode())
"""

SIZES: dict[str, Any] = {
    "vocab_size": 51,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "pp2": ({"tp_size": 1, "pp_size": 2, "num_microbatches": 2}, 2),
    "tp2": ({"tp_size": 2, "pp_size": 1}, 2),
    "pp2 x tp2": ({"tp_size": 2, "pp_size": 2, "microbatch_size": 1}, 4),
}


def with_our_name(program: str) -> str:
    program = re.sub(r"^import colossalai$", "import pipeflow.colossalai as colossalai", program, flags=re.MULTILINE)
    return re.sub(r"^from colossalai", "from pipeflow.colossalai", program, flags=re.MULTILINE)


def numbers(said: str, printed: str) -> list[float]:
    return [float(each) for each in re.findall(rf"^{said} (\S+)$", printed, re.MULTILINE)]


def plain() -> tuple[list[float], float, torch.nn.Module]:
    """The losses, the accuracy and the model of the same by torch alone."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)).double()
    decays: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        decays["bias" in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW(decays, lr=0.01)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    words = torch.randint(3, 50, (12, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in [*words.split(4)] * 2:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch).logits, batch.sum(1) % 3)
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    words = torch.randint(3, 50, (7, 8), generator=torch.Generator().manual_seed(0))
    right = (model.eval()(words).logits.argmax(1) == words.sum(1) % 3).double().mean()
    return losses, right.item(), model


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[] if each == "pp2 x tp2" else pytest.mark.exhaustive) for each in LAYOUTS]
)
def test_a_booster_fine_tunes_a_classifier(tmp_path: Path, layout: str) -> None:
    script = tmp_path / "finetune.py"
    script.write_text(with_our_name(BOOSTED), encoding="utf-8")
    options, ranks = LAYOUTS[layout]
    variables = {"OPTIONS": repr({**options, "precision": "fp32", "max_norm": 1e9}), "SIZES": repr(SIZES)}
    printed = run_ranks(script, ranks=ranks, folder=tmp_path, PYTHONPATH=str(ROOT), **variables)
    losses, accuracy, model = plain()
    told = numbers("loss", printed)
    assert told == pytest.approx(losses * (len(told) // len(losses)), rel=1e-9)
    assert numbers("accuracy", printed) == [accuracy] * ranks
    model.config.save_pretrained(tmp_path / "model")  # type: ignore[union-attr, operator]  # a model of transformers
    saved = type(model).from_pretrained(tmp_path / "model", dtype=torch.float64)  # type: ignore[attr-defined]  # likewise
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-9, atol=1e-12)


@pytest.mark.exhaustive
def test_a_script_runs_as_it_stands(tmp_path: Path) -> None:
    """With ColossalAI's own names, alone and on two ranks."""
    script, main = tmp_path / "benchmark.py", tmp_path / "main.py"
    script.write_text(SHARDED, encoding="utf-8")
    main.write_text("import pipeflow.colossalai.__main__ as main\nmain.main()\n", encoding="utf-8")
    printed = (run_ranks(main, str(script), ranks=ranks, folder=tmp_path) for ranks in (1, 2))
    alone, two = (numbers("loss", each) for each in printed)
    assert len(alone) == 4
    assert alone[-1] < alone[0]
    assert sorted(two) == pytest.approx(sorted(alone * 2), rel=1e-6)  # the model computes its loss in float32
