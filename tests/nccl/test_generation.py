"""What generating text issues does not deadlock under NCCL's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeflow import Pipeline, make_schedule
from pipeflow.huggingface import generate
from tests.nccl.device import DEVICE
from tests.nccl.recorder import recorded
from tests.nccl.test_programs import require_sound
from tests.stages.families import make

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HOW: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": 99}  # which never comes


def texts(name: str, schedule: str, beams: int) -> None:
    module, batch = make(transformers, name)
    model = Pipeline.from_module(module.eval(), make_schedule(schedule, ranks=2, microbatches=2), batch)
    model.eval()
    ids = torch.randint(3, 50, (4, 6), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    generate(model, ids, attention_mask=torch.ones_like(ids), num_beams=beams, do_sample=False, **HOW)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "schedule", "beams", "data"), [("llama", "1f1b", 1, 2), ("gpt2", "zb-v", 3, 1)])
def test_generation_does_not_deadlock(name: str, schedule: str, beams: int, data: int) -> None:
    require_sound(recorded(texts, 2 * data, name, schedule, beams, data=data))
