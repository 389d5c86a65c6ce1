"""from_pretrained, from_config and save_pretrained against transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeflow import execute_pipeline, make_schedule
from pipeflow.huggingface import from_pretrained, save_pretrained
from pipeflow.testing import run_threads
from tests.huggingface.models import RATE, logits, saved, trained
from tests.stages.families import FAMILIES, make

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TWO = make_schedule("1f1b", ranks=2, microbatches=3)
NAMED = ("llama-tied", "gpt2")
EACH = [pytest.param(name, marks=[] if name in NAMED else [pytest.mark.exhaustive]) for name in FAMILIES]


@pytest.mark.parametrize("name", EACH)
def test_load_train_save_and_load_again(name: str, tmp_path: Path) -> None:
    module, batch = make(transformers, name)
    folder = saved(module, tmp_path / "before", max_shard_size="40KB")

    def rank() -> None:
        model = from_pretrained(folder, TWO, batch, dtype=torch.float64)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(3):
            execute_pipeline(iter([batch]), model)
            optimizer.step()
            optimizer.zero_grad()
        save_pretrained(model, tmp_path / "after")

    run_threads(rank, 2, deadline=200.0)
    back, told = type(module).from_pretrained(tmp_path / "after", dtype=torch.float64, output_loading_info=True)  # type: ignore[attr-defined]  # of transformers
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = logits(trained(module, batch, 3), batch)
    assert (logits(back, batch) - expected).abs().max() < 1e-9 * max(1.0, float(expected.abs().max()))
