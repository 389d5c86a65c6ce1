"""Trees of tensors between ranks: outputs for all stages, and values of all replicas."""

from __future__ import annotations

from typing import Any

import torch

from pipeflow.parallel.context import current_context
from pipeflow.parallel.trees import gathered, padded, shared_outputs
from pipeflow.testing import run_threads


def test_ranks_share_outputs_and_gather_those_of_replicas() -> None:
    def rank() -> Any:
        context = current_context()
        mine = torch.full((1 + context.data_rank, 2 + context.data_rank), float(context.data_rank))
        is_last = context.pipeline_rank == 1
        logits, (loss, nothing) = shared_outputs((mine, [torch.tensor(3.0), None]) if is_last else None, context)
        assert logits.equal(mine)
        assert (float(loss), nothing) == (3.0, None)
        whole = gathered(padded((logits,), context, 1), context)[0]
        return whole.tolist(), gathered(torch.tensor(context.data_rank), context).tolist()

    for whole, ranks in run_threads(rank, 4, data=2):
        assert whole == [[0.0, 0.0, -100.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
        assert ranks == [0, 1]
