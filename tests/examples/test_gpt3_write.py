"""Text that a GPT writes over several pipeline ranks, a token at a time, is what the model in one piece would write:
each call has one token more than the one before, and none is as long as what the ranks train on.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pipeflow
from gpt3.build import build_gpt_pipeline, build_stage, options_of
from gpt3.model import GPTLMLoss
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.testing import run_threads

SHAPE = pipeflow.GPT(layers=4, hidden=16, heads=2, positions=12, vocabulary=23)
TRAINED, FIRST, TOKENS = 8, 5, 11  # tokens; 8 of them are among the lengths that are written, too


def build(schedule: pipeflow.Schedule) -> pipeflow.Pipeline:
    stages = build_gpt_pipeline(SHAPE.layers, placement=schedule.placement, seed=3, **options_of(SHAPE))
    return pipeflow.Pipeline(stages, schedule, criterion=GPTLMLoss(), tensor_shape=(1, TRAINED, SHAPE.hidden))


def write(model: pipeflow.Pipeline) -> list[int]:
    """The likeliest token after those before, which the last rank finds and tells the others."""
    ids = [FIRST]
    while len(ids) < TOKENS:
        batch = iter([({"input_ids": torch.tensor([ids])}, None)])
        output = pipeflow.execute_pipeline(batch, model, forward_only=True, return_outputs=True).outputs
        chosen = int(output[0, -1].argmax()) if isinstance(output, Tensor) else None
        [token] = [each for each in all_gather_object(current_context().world, chosen) if isinstance(each, int)]
        ids.append(token)
    return ids


def train_and_write(name: str, ranks: int) -> list[list[int]]:
    """Before, between and after steps."""
    model = build(pipeflow.make_schedule(name, ranks=ranks, microbatches=2))
    ids = torch.randint(SHAPE.vocabulary, (2, TRAINED), generator=torch.Generator().manual_seed(1))
    texts = [write(model)]
    for _ in range(2):
        pipeflow.execute_pipeline(iter([({"input_ids": ids}, ids)]), model)
        texts.append(write(model))
    return texts


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("interleaved-1f1b", 2)])
def test_ranks_write_what_the_model_in_one_piece_writes(name: str, ranks: int) -> None:
    plain = build_stage(0, SHAPE.layers, SHAPE.layers, first=True, last=True, seed=3, **options_of(SHAPE))
    ids = [FIRST]
    with torch.no_grad():
        while len(ids) < TOKENS:
            ids.append(int(plain.eval()(input_ids=torch.tensor([ids]))[0, -1].argmax()))
    assert len(set(ids)) > 2  # one word alone would show little
    assert run_threads(train_and_write, ranks, name, ranks) == [[ids] * 3] * ranks
