"""Names by which today's scripts find Megatron-LM's functions, and what these then do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.tensor.random import RandomTracker, current_tracker, set_tracker
from pipeflow.megatron.core import mpu, parallel_state, tensor_parallel
from pipeflow.megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from pipeflow.megatron.core.distributed.finalize_model_grads import finalize_model_grads
from pipeflow.megatron.core.enums import ModelType
from pipeflow.megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from pipeflow.megatron.core.tensor_parallel import CudaRNGStatesTracker, get_cuda_rng_tracker
from pipeflow.megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from pipeflow.testing import run_threads
from tests.megatron.small import forward_step, loader, logged_losses, models, run_step

FUNCTIONS: list[tuple[int, int | None, Callable[..., list[Any]]]] = [
    (1, None, schedules.forward_backward_no_pipelining),
    (2, None, schedules.forward_backward_pipelining_without_interleaving),
    (2, 2, schedules.forward_backward_pipelining_with_interleaving),
]


@pytest.mark.parametrize(("ranks", "chunks", "function"), FUNCTIONS, ids=["alone", "1f1b", "interleaved"])
def test_the_layout_chooses_the_function_of_a_step(
    ranks: int, chunks: int | None, function: Callable[..., list[Any]]
) -> None:
    """Called by its own name it takes the same step; those for other layouts say which one to call."""

    def rank() -> None:
        made = models(chunks or 1)
        assert get_forward_backward_func() is function
        options: Any = {"forward_step_func": forward_step, "num_microbatches": 2, "forward_only": True}
        model = made if chunks else made[0]
        logged = function(data_iterator=iter(loader()), model=model, **options)
        assert logged_losses(logged) == logged_losses(run_step(made, iter(loader()), 2, forward_only=True))
        for _, _, other in FUNCTIONS:
            if other is not function:
                with pytest.raises(UsageError, match=rf"for another layout: call {function.__name__}, or"):
                    other(data_iterator=iter(loader()), model=model, **options)

    run_threads(rank, ranks)


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


def test_older_names_and_kinds_of_models() -> None:
    assert mpu is parallel_state
    assert ModelType(1) is ModelType.encoder_or_decoder
    assert tensor_parallel.get_cuda_rng_tracker is get_cuda_rng_tracker


def drawn(tensor_rank: int) -> list[torch.Tensor]:
    """What a tensor rank draws outside, inside and again outside a region of split tensors."""
    torch.manual_seed(5)
    set_tracker(RandomTracker(3, place=(0, 0, tensor_rank)))
    before = torch.rand(3)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(3)
    with get_cuda_rng_tracker().fork():
        more = torch.rand(3)
    return [before, inside, more, torch.rand(3)]


def test_a_tensor_rank_draws_its_own_numbers_in_a_region_of_split_tensors() -> None:
    first, second = drawn(0), drawn(1)
    torch.manual_seed(5)
    assert [torch.equal(one, other) for one, other in zip(first, second, strict=True)] == [True, False, False, True]
    assert torch.equal(torch.cat([first[0], first[3]]), torch.rand(6))
    assert not torch.equal(first[1], first[2])
    tracker = RandomTracker(3, place=(0, 0, 1)).own
    assert torch.equal(torch.cat(second[1:3]), torch.rand(6, generator=tracker))


def test_a_state_that_a_script_adds_is_that_of_dropout() -> None:
    def rank() -> Any:
        set_tracker(RandomTracker(3))
        get_cuda_rng_tracker().reset()
        get_cuda_rng_tracker().add("model-parallel-rng", 7)
        current = current_tracker()
        assert current is not None
        return get_cuda_rng_tracker().get_states()["model-parallel-rng"], current.own.get_state()

    [states] = run_threads(rank, 1)
    assert all(torch.equal(state, torch.Generator().manual_seed(7).get_state()) for state in states)


def test_the_tracker_of_dropout_is_the_one_that_is_seeded() -> None:
    def rank() -> bool:
        models()
        model_parallel_cuda_manual_seed(7)
        states, current = get_cuda_rng_tracker().get_states(), current_tracker()
        assert current is not None
        return torch.equal(states["model-parallel-rng"], current.own.get_state())

    assert run_threads(rank, 1) == [True]


def test_states_of_ones_own() -> None:
    tracker = CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    tracker.add("mine", 4)
    with pytest.raises(UsageError, match="a state 'mine' already"):
        tracker.add("mine", 5)
    with pytest.raises(UsageError, match="no state 'other'"), tracker.fork("other"):
        pass
    kept = tracker.get_states()
    with tracker.fork("mine"):
        first = torch.rand(2)
    tracker.set_states(kept)
    with tracker.fork("mine"):
        assert torch.equal(torch.rand(2), first)
    tracker.reset()
    assert not tracker.is_initialized()
