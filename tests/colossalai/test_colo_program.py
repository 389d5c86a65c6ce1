"""A program in the way of the tutorial on ColoTensor: GPT-2 of transformers, its parameters split one by one, in one
process and in several, as it stands through `-m pipeflow.colossalai`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from colotensor.model import split
from pipeflow.colossalai.tensor import ProcessGroup
from pipeflow.colossalai.utils.model.colo_init_context import ColoInitContext
from pipeflow.testing import run_threads
from tests.covering import some_rows
from tests.scripts import run_ranks

pytest.importorskip("transformers")

PROGRAM = """
import sys
import warnings

import colossalai
import torch
import torch.distributed as dist
import torch.nn as nn
from colossalai.nn.parallel import GeminiDDP
from colossalai.tensor import ColoParameter, ComputePattern, ComputeSpec, ProcessGroup, ShardSpec
from colossalai.utils import get_current_device
from colossalai.utils.model.colo_init_context import ColoInitContext
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)  # transformers': a method has a new name


class LanguageModel(nn.Module):
    def __init__(self, checkpoint=False):
        super().__init__()
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.checkpoint = checkpoint
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **drops)).double()
        if checkpoint:
            self.model.gradient_checkpointing_enable()

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=not self.checkpoint)[0]


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def split_param_single_dim_tp1d(dim: int, param: ColoParameter, pg: ProcessGroup):
    spec = (ShardSpec([dim], [pg.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))
    if param.process_group.tp_world_size() == 1:
        param.set_process_group(pg)
    param.set_tensor_spec(*spec)


def split_param_row_tp1d(param: ColoParameter, pg: ProcessGroup):
    split_param_single_dim_tp1d(0, param, pg)


def split_param_col_tp1d(param: ColoParameter, pg: ProcessGroup):
    split_param_single_dim_tp1d(-1, param, pg)


def parallelize(model, pg):
    for mn, module in model.named_modules():
        for pn, param in module.named_parameters(recurse=False):
            param.set_process_group(pg)
            if "mlp.c_fc" in mn:
                split_param_col_tp1d(param, pg)
                param.compute_spec.set_output_replicate(False)
            elif "mlp.c_proj" in mn:
                if "weight" in pn:
                    split_param_row_tp1d(param, pg)
            elif "wte" in mn or "wpe" in mn or "c_attn" in mn or "c_proj" in mn:
                split_param_col_tp1d(param, pg)


way, degree = sys.argv[1], int(sys.argv[2])
colossalai.launch_from_torch(config={}, verbose=False)
torch.manual_seed(7)
if way == "plain":
    model = LanguageModel()
else:
    with ColoInitContext(device=torch.device("cpu")):
        model = LanguageModel(checkpoint="checkpoint" in way)
    pg = ProcessGroup(tp_degree=degree)
    parallelize(model, pg)
    if "gemini" in way:
        options = {"placement_policy": "cpu", "pin_memory": True, "search_range_m": 32}
        model = GeminiDDP(model, device=get_current_device(), **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(3)
ids = torch.randint(64, (4, 9), generator=generator)
if way != "plain" and pg.dp_world_size() > 1:
    ids = ids.chunk(pg.dp_world_size())[pg.dp_local_rank()]
for _ in range(5):
    optimizer.zero_grad()
    loss = loss_of(model(ids, torch.ones_like(ids)), ids)
    loss.backward()
    optimizer.step()
with torch.no_grad():
    loss = loss_of(model(ids, torch.ones_like(ids)), ids).detach()
if way != "plain":
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
print(f"LOSS {loss.item():.12f}", flush=True)
"""


def losses(folder: Path, way: str, degree: int, ranks: int) -> list[float]:
    (folder / "colo.py").write_text(PROGRAM, encoding="utf-8")
    script = folder / "main.py"
    script.write_text("import pipeflow.colossalai.__main__ as main\nmain.main()\n", encoding="utf-8")
    said = run_ranks(script, str(folder / "colo.py"), way, str(degree), ranks=ranks, folder=folder, HF_HUB_OFFLINE="1")
    return [float(each) for each in re.findall(r"LOSS (\S+)", said)]


WAYS = [("colo", 1, 1), ("colo", 2, 2), ("colo, checkpoint", 2, 2), ("colo, gemini", 2, 4), ("colo, gemini", 1, 2)]


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "degree", "ranks"),
    some_rows(WAYS, [("colo", 2, 2), ("colo, checkpoint", 2, 2), ("colo, gemini", 2, 4)]),
)
def test_the_program_trains_as_the_plain_one(tmp_path: Path, way: str, degree: int, ranks: int) -> None:
    [plain] = losses(tmp_path, "plain", 1, 1)
    found = losses(tmp_path, way, degree, ranks)
    assert len(found) == ranks
    assert found == pytest.approx([plain] * ranks, rel=1e-9)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_pretrained_weights_are_split(tmp_path: Path) -> None:
    """Those that transformers' from_pretrained loads, by the model's own class."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    saved = transformers.GPT2LMHeadModel(config).eval()
    saved.save_pretrained(tmp_path)
    words = torch.arange(8)[None]
    expected = saved(words).logits.detach()

    def logits() -> Any:
        with ColoInitContext():
            model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        assert model.lm_head.weight is model.transformer.wte.weight
        group = ProcessGroup(tp_degree=2)
        split(model, group)
        held = sum(each.numel() for each in model.parameters())
        return model.eval()(words).logits.detach(), held

    for found, held in run_threads(logits, 2, data=2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert held < 0.6 * sum(each.numel() for each in saved.parameters())
