"""Megatron-LM's `megatron.core.pipeline_parallel.schedules`: a step that calls the user's `forward_step_func` for every
microbatch, with pipeflow's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, tee
from typing import Any, NamedTuple, Protocol

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


class ForwardBackward(Protocol):
    """Runs one step: each stage of this rank calls `forward_step_func(data_iterator, model)` once per microbatch, in
    order. The gradients of the mean loss over the microbatches, averaged over the replicas, are added to `.grad`; those
    of tied weights are summed. finalize_model_grads is not needed.

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
        collect_non_loss_data: with `forward_only`, collect the results of the loss function called with
            `non_loss_data=True`.

    Returns the logged values, one entry per microbatch, on ranks with the last stage; an empty list elsewhere.

    Raises UsageError if the iterator has ended. Raises PipelineError on all ranks if one failed, or if the first
    batches of a replica's ranks differ.
    """

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Iterators,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
    ) -> list[Any]: ...


def get_forward_backward_func() -> ForwardBackward:
    """Returns the one of the three functions below that is for the layout. Raises UsageError before
    `initialize_model_parallel`.
    """
    if context_here().pipeline_size == 1:
        return forward_backward_no_pipelining
    if get_virtual_pipeline_model_parallel_world_size() is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


def forward_backward_no_pipelining(**options: Any) -> list[Any]:
    """Runs a step on one pipeline rank, one microbatch after another. Arguments and result are those of
    ForwardBackward. Raises UsageError under another layout; likewise the functions below.
    """
    return _forward_backward_for(forward_backward_no_pipelining, options)


def forward_backward_pipelining_without_interleaving(**options: Any) -> list[Any]:
    """Runs a step of a pipeline with one stage per rank, with 1f1b."""
    return _forward_backward_for(forward_backward_pipelining_without_interleaving, options)


def forward_backward_pipelining_with_interleaving(**options: Any) -> list[Any]:
    """Runs a step of a pipeline with several stages per rank, with interleaved-1f1b."""
    return _forward_backward_for(forward_backward_pipelining_with_interleaving, options)


def _forward_backward_for(function: Callable[..., list[Any]], options: dict[str, Any]) -> list[Any]:
    if (fitting := get_forward_backward_func()) is not function:
        name = fitting.__name__  # type: ignore[attr-defined]  # a function
        raise UsageError(f"{function.__name__} is for another layout: call {name}, or get_forward_backward_func()")
    return _forward_backward(**options)


def _forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterators,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
) -> list[Any]:
    if collect_non_loss_data and not forward_only:
        raise UsageError("collect_non_loss_data=True computes no loss to train with: pass forward_only=True too")
    prepared = _prepared((model,) if isinstance(model, nn.Module) else tuple(model), num_microbatches)
    prepared.loss.begin(collect_non_loss_data)
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

    def begin(self, collect_non_loss_data: bool) -> None:
        """Called before a step; removes what the last step logged."""
        self.collect_non_loss_data, self.logged = collect_non_loss_data, list[Any]()

    def __call__(self, output: tuple[Tensor, LossFunction], _: Tensor) -> Tensor:
        tensor, loss_function = output
        if self.collect_non_loss_data:
            self.logged.append(loss_function(tensor, non_loss_data=True))
            return tensor.new_zeros(())
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
