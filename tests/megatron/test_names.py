"""Names by which today's scripts find Megatron-LM's functions, and what these then do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.megatron.core import mpu, parallel_state
from pipeflow.megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from pipeflow.megatron.core.distributed.finalize_model_grads import finalize_model_grads
from pipeflow.megatron.core.pipeline_parallel import get_forward_backward_func
from pipeflow.testing import run_threads
from tests.megatron.small import loader, logged_losses, models, run_step


def test_without_a_layout_there_is_no_function() -> None:
    with pytest.raises(UsageError, match="call initialize_model_parallel"):
        get_forward_backward_func()


def test_a_wrapped_stage_trains_as_the_stage_itself() -> None:
    """With the calls of a script that wraps it: finalize_model_grads after each step, though the step did it."""

    def trained(wraps: bool) -> Any:
        [stage] = models()
        model: nn.Module = stage
        if wraps:
            model = DistributedDataParallel(
                stage.config, DistributedDataParallelConfig(overlap_grad_reduce=True), stage
            )
        optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), iter(loader())
        for _ in range(2):
            if wraps:
                model.zero_grad_buffer()  # type: ignore[operator]  # a method
            else:
                optimizer.zero_grad()
            logged = run_step([model], batches, 2)
            finalize_model_grads([model])
            optimizer.step()
        return logged_losses(logged), {name: value.detach().clone() for name, value in stage.named_parameters()}

    for (_, plain), (_, wrapped) in zip(
        run_threads(trained, 4, False, data=2), run_threads(trained, 4, True, data=2), strict=True
    ):
        torch.testing.assert_close(wrapped, plain, rtol=0, atol=0)


def test_what_a_step_does_already_is_not_asked_for() -> None:
    with pytest.raises(UsageError, match="let the loss function return"):
        finalize_model_grads([], num_tokens=torch.tensor(3))
    with pytest.raises(UsageError, match=r"wrap the optimizer with pipeflow\.Zero"):
        DistributedDataParallelConfig(use_distributed_optimizer=True)
    with pytest.raises(UsageError, match="averaged in their own dtype"):
        DistributedDataParallelConfig(grad_reduce_in_fp32=True)


def test_an_older_name() -> None:
    assert mpu is parallel_state
