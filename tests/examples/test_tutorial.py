"""A program in the way of the tutorial on hybrid parallelism, with its imports: nothing but the package's name is
replaced. It is run by four processes, a pipeline of two whose every rank is two.
And what docs/migration.md says exists.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import pipeflow
from tests.examples.conftest import EXAMPLES, write_text
from tests.scripts import run_ranks

PROGRAM = """
import os
import sys
from collections.abc import Callable

import torch
import torch.nn as nn
from torch.nn import functional as F

import colossalai
import colossalai.utils as utils
import model_zoo.gpt.gpt as col_gpt
from colossalai import nn as col_nn
from colossalai.amp import AMP_TYPE
from colossalai.builder.pipeline import partition_uniform
from colossalai.context.parallel_mode import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import InterleavedPipelineSchedule, PipelineSchedule
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.layer.wrapper import PipelineSharedModuleWrapper
from colossalai.trainer import Trainer, hooks
from colossalai.utils.timer import MultiTimer
from model_zoo.gpt import GPTLMLoss

from gpt3.webtext import WebtextDataset


class TutorialGPT(nn.Module):
    def __init__(
        self,
        num_layers: int = 12,
        hidden_size: int = 768,
        num_attention_heads: int = 12,
        vocab_size: int = 50304,
        embed_drop_rate: float = 0.0,
        act_func: Callable = F.gelu,
        mlp_ratio: int = 4,
        attn_drop_rate: float = 0.0,
        drop_rate: float = 0.0,
        dtype: torch.dtype = torch.float,
        checkpoint: bool = False,
        max_position_embeddings: int = 1024,
        layer_norm_epsilon: float = 1e-5,
        first: bool = False,
        last: bool = False,
    ):
        super().__init__()
        self.embedding, self.norm, self.head = None, None, None
        if first:
            self.embedding = col_gpt.GPTEmbedding(
                hidden_size, vocab_size, max_position_embeddings, dropout=embed_drop_rate, dtype=dtype
            )
        make = lambda: col_gpt.GPTBlock(
            hidden_size,
            num_attention_heads,
            mlp_ratio=mlp_ratio,
            attention_dropout=attn_drop_rate,
            dropout=drop_rate,
            dtype=dtype,
            checkpoint=checkpoint,
            activation=act_func,
        )
        self.blocks = nn.ModuleList([make() for _ in range(num_layers)])
        if last:
            self.norm = col_nn.LayerNorm(hidden_size, eps=layer_norm_epsilon, dtype=dtype)
            self.head = col_gpt.GPTLMHead(vocab_size=vocab_size, dim=hidden_size, dtype=dtype, bias=False)

    def forward(self, hidden_states=None, input_ids=None, attention_mask=None):
        if self.embedding is not None:
            hidden_states = self.embedding(input_ids=input_ids)
        mask = attention_mask.view(hidden_states.shape[0], -1)[:, None, None, :].to(dtype=hidden_states.dtype)
        mask = (1.0 - mask) * -10000.0
        for block in self.blocks:
            hidden_states, mask = block(hidden_states, mask)
        return hidden_states if self.norm is None else self.head(self.norm(hidden_states))


def build(num_layers, num_chunks, device=torch.device("cpu"), **kwargs):
    logger = get_dist_logger()
    size = gpc.get_world_size(ParallelMode.PIPELINE)
    place = gpc.get_local_rank(ParallelMode.PIPELINE)
    rank = gpc.get_global_rank()
    wrapper = PipelineSharedModuleWrapper([0, size - 1])
    models = []
    for start, end in partition_uniform(num_layers, size, num_chunks)[place]:
        kwargs["num_layers"] = end - start
        kwargs["first"] = start == 0
        kwargs["last"] = end == num_layers
        logger.info(f"Rank{rank} build layer {start}-{end}, {end - start}/{num_layers} layers")
        chunk = TutorialGPT(**kwargs).to(device)
        if start == 0:
            wrapper.register_module(chunk.embedding.word_embeddings)
        elif end == num_layers:
            wrapper.register_module(chunk.head)
        models.append(chunk)
    return models[0] if len(models) == 1 else nn.ModuleList(models)


NUM_EPOCHS = 2
SEQ_LEN = 16
BATCH_SIZE = 8
NUM_CHUNKS = eval(os.environ["NUM_CHUNKS"])
TENSOR_SHAPE = (2, 16, 32)
CONFIG = dict(
    NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2, tensor=dict(mode="1d", size=2)), fp16=dict(mode=AMP_TYPE.NAIVE)
)
CONFIG |= eval(os.environ["MORE"])


def train():
    disable_existing_loggers()
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(config=CONFIG, backend=args.backend)
    logger = get_dist_logger()
    train_ds = WebtextDataset(os.environ["DATA"], seq_len=SEQ_LEN)
    train_dataloader = utils.get_dataloader(
        train_ds, seed=42, batch_size=BATCH_SIZE, pin_memory=False, shuffle=True, drop_last=True
    )
    use_interleaved = NUM_CHUNKS is not None
    num_chunks = 1 if not use_interleaved else NUM_CHUNKS
    sizes = dict(hidden_size=32, num_attention_heads=4, vocab_size=512)
    model = build(4, num_chunks, checkpoint=True, dtype=torch.half, **sizes)
    if use_interleaved and not isinstance(model, nn.ModuleList):
        model = nn.ModuleList([model])
    criterion = GPTLMLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-2)

    engine, train_dataloader, _, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader=train_dataloader
    )
    accumulation = getattr(gpc.config, "gradient_accumulation", 1)
    global_batch_size = BATCH_SIZE * gpc.get_world_size(ParallelMode.DATA) * accumulation
    logger.info(f"with {gpc.config.tensor_shape}, {gpc.config.num_chunks}", ranks=[0])
    logger.info(f"Init done, global batch size = {global_batch_size}", ranks=[0])
    timer = MultiTimer()
    trainer = Trainer(engine=engine, logger=logger, timer=timer)
    hook_list = [
        hooks.LossHook(),
        hooks.LogMetricByEpochHook(logger),
        hooks.ThroughputHook(),
        hooks.LogMetricByStepHook(),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=NUM_EPOCHS,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
        return_output_label=False,
    )


if __name__ == "__main__":
    train()
"""


MIGRATION = EXAMPLES.parent / "docs" / "migration.md"
PATHS = f"{EXAMPLES.parent}{os.pathsep}{EXAMPLES}"


def test_what_the_migration_names_exists() -> None:
    """Every import of the second column, and every name of `pipeflow` in it."""
    here = "\n".join(re.findall(r"^\| `.*? \| (.*) \|$", MIGRATION.read_text(encoding="utf-8"), re.MULTILINE))
    imports = re.findall(r"`((?:from [\w.]+ )?import \w[\w., ]*)`", here)
    assert len(imports) > 19
    for line in imports:
        exec(line, {})
    for name in re.findall(r"`pipeflow\.(\w+)", here):
        assert hasattr(pipeflow, name) or find_spec(f"pipeflow.{name}") is not None


def with_our_name(program: str) -> str:
    program = re.sub(r"^import colossalai$", "import pipeflow.colossalai as colossalai", program, flags=re.MULTILINE)
    return re.sub(r"^(import|from) colossalai", r"\1 pipeflow.colossalai", program, flags=re.MULTILINE)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("chunks", "more"),
    [("None", "{}"), ("2", "{'NUM_CHUNKS': NUM_CHUNKS}")],
    ids=["variables of the script", "chunks"],
)
@pytest.mark.slow
def test_the_tutorials_calls_train_a_model(tmp_path: Path, text: Path, chunks: str, more: str) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(with_our_name(PROGRAM), encoding="utf-8")
    write_text(text, [f"document {number % 3} says the same as {number % 3} " * 3 for number in range(48)])
    variables = {"DATA": str(text), "NUM_CHUNKS": chunks, "MORE": more, "COLUMNS": "200", "PYTHONPATH": PATHS}
    printed = run_ranks(script, ranks=4, folder=None, **variables)
    assert f"with (2, 16, 32), {chunks}" in printed
    assert "Init done, global batch size = 8" in printed
    layers = range(0, 4, 2 if chunks == "None" else 1)
    for start in layers:
        assert printed.count(f"build layer {start}-{start + layers.step}, {layers.step}/4 layers") == 2
    losses = [float(loss) for loss in re.findall(r"Train\]: Loss = ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 1
