"""A program by Megatron-LM's names, as labs are written: processes that torchrun starts train under several layouts in
turn, save, and load what another layout saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipeflow.colossalai.__main__
from tests.scripts import run_ranks

PROGRAM = """
import json
import os
import sys
from functools import partial

import torch
from torch.optim import Adam
from torch.utils.data import DataLoader

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.tokenizer.tokenizer import _NullTokenizer

LENGTH = 16
DEVICE = torch.device("cpu")


def arrange(tensor, pipeline):
    parallel_state.destroy_model_parallel()
    if given["group"] and not torch.distributed.is_initialized():
        ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        torch.distributed.init_process_group(world_size=ranks, rank=rank)
    parallel_state.initialize_model_parallel(tensor, pipeline)
    model_parallel_cuda_manual_seed(123)


def make_model():
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, params_dtype=torch.float64, pipeline_dtype=torch.float64,
    )
    layers = get_gpt_layer_local_spec()
    return GPTModel(config=config, transformer_layer_spec=layers, vocab_size=24, max_sequence_length=LENGTH).to(DEVICE)


def make_batches():
    if torch.distributed.get_rank() == 0:
        compile_helpers()
    torch.distributed.barrier()
    config = GPTDatasetConfig(random_seed=0, sequence_length=LENGTH, tokenizer=_NullTokenizer(vocab_size=LENGTH))
    train, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [80, None, None], lambda: True, config).build()
    return iter(DataLoader(train, batch_size=8, shuffle=True))


def masked_loss(loss_mask, losses):
    loss = (losses.view(-1) * loss_mask.view(-1)).sum() / loss_mask.sum()
    return loss, {"lm loss": loss}


def forward_step(data_iterator, model):
    data = {name: value.to(DEVICE) for name, value in next(data_iterator).items()}
    losses = model(data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"])
    return losses, partial(masked_loss, data["loss_mask"])


def run(step, model, batches, forward_only=False):
    logged = step(
        forward_step_func=forward_step, data_iterator=batches, model=model, num_microbatches=2, seq_length=LENGTH,
        micro_batch_size=8, decoder_seq_length=LENGTH, forward_only=forward_only,
    )
    return [float(values["lm loss"]) for values in logged]


def train(model, batches):
    optimizer, step, losses = Adam(model.parameters(), lr=0.01), get_forward_backward_func(), []
    for _ in range(4):
        optimizer.zero_grad()
        losses += run(step, model, batches)
        optimizer.step()
    return losses


given = json.loads(sys.argv[1])
for tensor, pipeline in given["layouts"]:
    arrange(tensor, pipeline)
    if given["seed"] is None:
        torch.seed()  # another one in each process, and it is not too late
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor, pipeline)
    else:
        torch.manual_seed(given["seed"])
    model = make_model()
    batches = make_batches()
    if given["load"]:
        state = model.sharded_state_dict(prefix="")
        checkpoint = dist_checkpointing.load(sharded_state_dict=state, checkpoint_dir=given["folder"])
        model.load_state_dict(checkpoint)
        losses = run(get_forward_backward_func(), model, batches, forward_only=True)
    else:
        losses = train(model, batches)
        state = model.sharded_state_dict(prefix="")
        dist_checkpointing.save(sharded_state_dict=state, checkpoint_dir=given["folder"])
    if parallel_state.is_pipeline_last_stage():
        print(json.dumps(losses), flush=True)
parallel_state.destroy_model_parallel()
"""


RUNNER = Path(pipeflow.colossalai.__main__.__file__)


def run(folder: Path, ranks: int, *layouts: tuple[int, int], **options: Any) -> list[list[float]]:
    """The losses that each rank of a last stage printed, rank by rank, layout by layout."""
    given = {"layouts": layouts, "folder": str(folder / "saved"), "load": False, "seed": 3, "group": True, **options}
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    printed = run_ranks(RUNNER, str(program), json.dumps(given), ranks=ranks)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.exhaustive
def test_a_program_trains_alike_under_one_layout_after_the_other(tmp_path: Path) -> None:
    """(tensor, pipeline), where there are more ranks with replicas; and what the last one saved, one rank loads."""
    [alone] = run(tmp_path, 1, (1, 1))
    assert len(alone) == 8
    assert alone[-1] < alone[0]
    found = run(tmp_path, 2, (2, 1), (1, 2), (1, 1))
    assert found == [pytest.approx(alone, rel=1e-9)] * 5
    found = run(tmp_path, 4, (1, 2), (2, 2), group=False)
    assert found == [pytest.approx(alone, rel=1e-9)] * 4
    [expected] = run(tmp_path, 1, (1, 1), load=True)
    assert expected[0] < alone[0]
    for layout, ranks in (((2, 1), 2), ((2, 2), 2)):
        assert run(tmp_path, 2 * layout[1], layout, load=True) == [pytest.approx(expected, rel=1e-9)] * ranks


@pytest.mark.slow
def test_loaders_that_nobody_seeded_agree_within_a_replica(tmp_path: Path) -> None:
    one, same, other, of_other = run(tmp_path, 4, (2, 1), seed=None)
    assert one == same
    assert other == of_other
    assert one != other
