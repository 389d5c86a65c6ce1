"""The Megatron lab: its losses, its data, and its run from the command line."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch

import megatron_lab.lab
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from tests.examples.conftest import EXAMPLES
from tests.scripts import run_ranks


def test_masked_tokens_do_not_move_the_loss() -> None:
    mask, losses = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 3.0, 100.0]])

    class Known(torch.nn.Module):
        def forward(self, *_: Any, **__: Any) -> Any:
            return losses

    names = ("tokens", "position_ids", "attention_mask", "labels")
    sample = {**dict.fromkeys(names, torch.zeros(1, 3)), "loss_mask": mask}
    found, loss_func = megatron_lab.lab.forward_step_func(iter([sample]), Known())
    loss, logged = loss_func(found)
    assert float(loss) == float(logged["lm loss"]) == 2.0


def test_ranks_of_a_replica_read_the_same() -> None:
    def first() -> tuple[int, Any]:
        return current_context().data_rank, next(megatron_lab.lab.get_train_data_iterator(tiny=True))["tokens"]

    (_, one), (_, same), (replica, other), _ = run_threads(first, 4, tensor=2, data=2)
    assert one.equal(same)
    assert replica == 1
    assert not one.equal(other)


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(2, ()), (4, ("--pipeline", "2", "--microbatches", "2"))])
def test_the_lab_runs(tmp_path: Any, ranks: int, layout: tuple[str, ...]) -> None:
    options = ("--tiny", "--steps", "3", "--checkpoint", str(tmp_path / "saved"), *layout)
    printed = run_ranks(EXAMPLES / "megatron_lab" / "lab.py", *options, ranks=ranks)
    losses = [float(loss) for loss in re.findall(r"lm loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert all(later < sooner for sooner, later in pairwise(losses))
    assert "loaded: every weight is what was saved\n" in printed
    assert (tmp_path / "saved").is_dir()
