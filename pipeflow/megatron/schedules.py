"""Megatron-LM's `megatron.core.pipeline_parallel.schedules`: a step that calls the user's `forward_step_func` for every
microbatch, with pipeflow's engine; and its `megatron.core.distributed`, whose sums every step does itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeflow.adapters.batches import alike
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import keep, kept
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.engine.torch_private.trees import tree_map_only
from pipeflow.megatron.parallel_state import context_here, get_virtual_pipeline_model_parallel_world_size
from pipeflow.schedules import make_schedule

LossFunction = Callable[..., tuple[Any, ...]]
ForwardStep = Callable[[Any, Any], tuple[Tensor, LossFunction]]
Iterators = Iterator[Any] | Sequence[Iterator[Any]] | None

_KEY = "Megatron-LM's pipelines"


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """Returns `forward_backward`, which takes a step under any layout. Raises UsageError before
    `initialize_model_parallel`.
    """
    context_here()
    return forward_backward


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterators,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
) -> list[Any]:
    """Runs one step: each stage of this rank calls `forward_step_func(data_iterator, model)` once per microbatch, in
    order. The gradients of the mean loss over the microbatches, averaged over the replicas, are added to `.grad`; those
    of tied weights are summed. The schedule is 1f1b, or interleaved-1f1b for several stages per rank.

    Args:
        forward_step_func: takes a microbatch from the iterator, and returns the model's output and a loss function of
            it, which the last stage calls. That function returns (loss, values to log), or (sum of losses, number of
            tokens, values to log).
        data_iterator: an iterator with the same batches on all ranks of a replica. With several stages per rank, a list
            with one iterator per stage, or one iterator that all of them share.
        model: a model with `set_input_tensor`, or a list with this rank's stages in order. It is kept, together with
            its Pipeline, until destroy_model_parallel.
        num_microbatches: number of microbatches in the step.
        forward_only: evaluate, without gradients.
        seq_length, micro_batch_size, decoder_seq_length: have no effect; shapes are those of the data.

    Returns the logged values, one entry per microbatch, on ranks with the last stage; an empty list elsewhere.

    Raises UsageError if the iterator has ended. Raises PipelineError on all ranks if one failed, or if the first
    batches of a replica's ranks differ.
    """
    prepared = _prepared((model,) if isinstance(model, nn.Module) else tuple(model), num_microbatches)
    prepared.loss.logged = []
    batch = _batch(prepared.stages, forward_step_func, data_iterator, num_microbatches)
    schedule = _schedule_of(len(prepared.stages), num_microbatches)
    execute_pipeline(batch, prepared.pipeline, forward_only=forward_only, schedule=schedule)
    return prepared.loss.logged


class _Stage(nn.Module):
    """A model as a stage of a Pipeline, which calls the user's `forward_step_func`."""

    forward_step_func: ForwardStep
    data_iterator: Iterator[Any] | None
    model: Any  # a module with set_input_tensor

    def __init__(self, model: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.model, self.is_last = model, is_last

    def forward(self, hidden_states: Tensor | None = None, **_: Tensor) -> object:
        self.model.set_input_tensor(hidden_states)
        output, loss_function = self.forward_step_func(self.data_iterator, self.model)
        return (output, loss_function) if self.is_last else output


class _Loss:
    """The criterion of the Pipeline; it stores the values to log."""

    logged: list[Any]  # in this step

    def __call__(self, output: tuple[Tensor, LossFunction], _: Tensor) -> Tensor:
        tensor, loss_function = output
        match loss_function(tensor):
            case loss, values:
                self.logged.append(tree_map_only(Tensor, Tensor.detach, values))
                return loss  # type: ignore[no-any-return]  # the engine checks it
            case total, tokens, values:
                self.logged.append(tree_map_only(Tensor, Tensor.detach, values))
                return total / tokens  # type: ignore[no-any-return]  # the engine checks it
            case other:
                raise UsageError(
                    "a loss function must return (loss, values to log) or (loss, number of tokens, values to log), got "
                    f"{len(other)} values"
                )


class _Prepared(NamedTuple):
    """The objects that a step makes from its models."""

    pipeline: Pipeline
    stages: list[_Stage]
    loss: _Loss


def _prepared(models: tuple[nn.Module, ...], microbatches: int) -> _Prepared:
    """The objects for these models, made in their first step and kept with the context."""
    known: dict[tuple[nn.Module, ...], _Prepared] = kept(_KEY) or {}
    if models not in known:
        _require_models(models)
        schedule, loss = _schedule_of(len(models), microbatches), _Loss()
        last = schedule.placement.num_stages - 1
        own = schedule.placement.stages_of(context_here().pipeline_rank)
        stages = [_Stage(model, is_last=stage == last) for stage, model in zip(own, models, strict=True)]
        known[models] = _Prepared(Pipeline(nn.ModuleList(stages), schedule, criterion=loss, weigh=alike), stages, loss)
        keep(_KEY, known)
    return known[models]


def _require_models(models: Sequence[nn.Module]) -> None:
    chunks = get_virtual_pipeline_model_parallel_world_size() or 1
    if len(models) != chunks:
        raise UsageError(
            f"initialize_model_parallel was called with {chunks} stages per rank "
            f"(virtual_pipeline_model_parallel_size), got {len(models)} models"
        )
    for model in models:
        if not callable(getattr(model, "set_input_tensor", None)):
            raise UsageError(
                f"{type(model).__name__} needs a method set_input_tensor(tensor) that takes the previous stage's "
                "output, as in GPTModel"
            )


def _schedule_of(chunks: int, microbatches: int) -> Schedule:
    ranks = context_here().pipeline_size
    if chunks == 1:
        return make_schedule("1f1b", ranks=ranks, microbatches=microbatches)
    return make_schedule("interleaved-1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks)


def _batch(
    stages: Sequence[_Stage], forward_step_func: ForwardStep, data_iterator: Iterators, microbatches: int
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """A step's batch for the engine. One sample stands for a microbatch, which the stages read themselves. It contains
    a digest of the first microbatch, so that the engine notices ranks that read other data.
    """
    digest = 0.0
    for stage, each in zip(stages, _per_stage(data_iterator, len(stages)), strict=True):
        stage.forward_step_func, stage.data_iterator = forward_step_func, each
        if each is not None:
            first = next(each, _END)
            if first is _END:
                raise UsageError("data_iterator has ended: a step takes num_microbatches batches; make a new iterator")
            stage.data_iterator = chain([first], each)
            digest = Batch(first, None, [], torch.device("cpu")).digest()
    samples = torch.full((microbatches,), digest, dtype=torch.float64, device="cpu")
    yield {"microbatches": samples}, samples


_END = object()


def _per_stage(data_iterator: Iterators, stages: int) -> Sequence[Iterator[Any] | None]:
    """One iterator for each of this rank's stages. Raises UsageError for another number of iterators."""
    if data_iterator is None:
        return [None] * stages
    if isinstance(data_iterator, Sequence):
        if len(data_iterator) != stages:
            raise UsageError(f"data_iterator must be one, or one for each of {stages} models, got {len(data_iterator)}")
        return data_iterator
    if not isinstance(data_iterator, Iterator):
        raise UsageError(f"data_iterator must be an iterator, got {type(data_iterator).__name__}: pass iter(loader)")
    return tee(data_iterator, stages) if stages > 1 else [data_iterator]


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """Settings of reductions over replicas. Other options of Megatron-LM's class raise a TypeError that names them.

    Attributes:
        grad_reduce_in_fp32: must be False: gradients are averaged in their own dtype.
        overlap_grad_reduce: has no effect: reductions always overlap computations.
        use_distributed_optimizer: must be False.
        check_for_nan_in_grad, bucket_size: have no effect.

    Raises UsageError for values that are not supported.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        if self.grad_reduce_in_fp32:
            raise UsageError("grad_reduce_in_fp32=True is not supported: gradients are averaged in their own dtype")
        if self.use_distributed_optimizer:
            raise UsageError("use_distributed_optimizer=True is not supported: wrap the optimizer with pipeflow.Zero")


class DistributedDataParallel(nn.Module):
    """A stage, which it calls. Every step averages gradients over the replicas without it.

    Args:
        config: the TransformerConfig of the model.
        ddp_config: settings of reductions.
        module: this rank's stage.
    """

    def __init__(self, config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> None:
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Sets the input of the stage's next call."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]  # a method

    def zero_grad_buffer(self) -> None:
        """Clears the gradients of all parameters."""
        self.zero_grad()


def finalize_model_grads(model: Sequence[nn.Module], num_tokens: Tensor | None = None) -> None:
    """Does nothing: every step ends with these sums over replicas, tied weights and tensor ranks.

    Args:
        model: this rank's stages.
        num_tokens: must be None; to average over tokens, return their number from the loss function.

    Raises UsageError for `num_tokens`.
    """
    if num_tokens is not None:
        raise UsageError(
            "finalize_model_grads takes no num_tokens: let the loss function return (sum of losses, number of tokens, "
            "values to log)"
        )
