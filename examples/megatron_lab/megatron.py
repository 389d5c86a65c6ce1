"""What the Megatron lab calls by Megatron-LM's names, on pipeflow: a model that gives a loss per token, a step that
calls `forward_step_func` once a microbatch, and checkpoints. Not here: the lab (`lab`) and its data (`samples`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

import pipeflow
from gpt3.build import build_gpt_pipeline
from gpt3.model import PipelineGPTHybrid
from pipeflow import load_checkpoint, save_checkpoint
from pipeflow.tensor import vocab_parallel_cross_entropy

Sample = dict[str, Tensor]
Logged = dict[str, Tensor]
LossFunction = Callable[[Tensor], tuple[Tensor, Logged]]
ForwardStep = Callable[[Iterator[Sample], nn.Module], tuple[Tensor, LossFunction]]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of a model, and `pipeline_dtype`, the type of what passes between its stages. First weights never
    depend on the layout, so `use_cpu_initialization` says nothing that is not so.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    use_cpu_initialization: bool = True
    pipeline_dtype: torch.dtype = torch.float32


class GPTModel(nn.Module):
    """This rank's stage of a GPT, by default made here. Called with `labels`, the last stage gives each token's loss,
    (batch, length); without, its scores. An inner stage gives what the next one takes, which `set_input_tensor` hands
    to it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        *,
        stage: PipelineGPTHybrid | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.stage = stage or build_stages(config, vocab_size, max_sequence_length)[0]
        self._input: Tensor | None = None

    def set_input_tensor(self, hidden_states: Tensor | None) -> None:
        """Takes what the stage before made, for the next call."""
        self._input = hidden_states

    def forward(
        self, tokens: Tensor, position_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """`attention_mask` is Megatron-LM's: (batch, 1, length, length), True where a token must not look."""
        hidden_states, self._input = self._input, None
        output: Tensor = self.stage(hidden_states, tokens, ~attention_mask, position_ids)
        if self.stage.head is None or labels is None:
            return output
        return vocab_parallel_cross_entropy(output, labels, reduction="none")


def build_stages(
    config: TransformerConfig, vocab_size: int, max_sequence_length: int, num_chunks: int = 1
) -> list[PipelineGPTHybrid]:
    """This rank's stages, one a chunk."""
    built = build_gpt_pipeline(
        config.num_layers,
        num_chunks,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        vocab_size=vocab_size,
        max_position_embeddings=max_sequence_length,
        dtype=config.pipeline_dtype,
    )
    stages = built if isinstance(built, nn.ModuleList) else [built]
    return [stage for stage in stages if isinstance(stage, PipelineGPTHybrid)]


class StepStage(nn.Module):
    """A model as a stage of a Pipeline: every microbatch goes through `forward_step_func`, which the last stage's loss
    function comes from.
    """

    def __init__(self, model: GPTModel, forward_step_func: ForwardStep) -> None:
        super().__init__()
        self.model = model
        self.forward_step_func = forward_step_func

    def forward(self, hidden_states: Tensor | None = None, **sample: Tensor) -> object:
        self.model.set_input_tensor(hidden_states)
        output, loss_func = self.forward_step_func(iter([sample]), self.model)
        return output if self.model.stage.head is None else (output, loss_func)


class ForwardBackward(Protocol):
    """A step: `num_microbatches` items of `data_iterator`, each through `forward_step_func`. Gives what its loss
    function logged, a dict per microbatch, on the last stage, else nothing; the gradients are in `.grad`. Sizes need
    not be given: they are the data's.
    """

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Iterator[Sample],
        model: GPTModel | Sequence[GPTModel],
        num_microbatches: int,
        forward_only: bool = False,
        **sizes: int,
    ) -> list[Logged]: ...


def get_forward_backward_func() -> ForwardBackward:
    """The step for the pipeline that was launched and the model's chunks: 1f1b, which with one rank is a microbatch
    after the other, or with several chunks interleaved-1f1b.
    """
    pipelines: dict[tuple[object, ...], tuple[pipeflow.Pipeline, list[Logged]]] = {}  # by the chunks and what runs them

    def forward_backward(
        *,
        forward_step_func: ForwardStep,
        data_iterator: Iterator[Sample],
        model: GPTModel | Sequence[GPTModel],
        num_microbatches: int,
        forward_only: bool = False,
        **sizes: int,
    ) -> list[Logged]:
        chunks = (model,) if isinstance(model, GPTModel) else tuple(model)
        schedule = schedule_of(len(chunks), num_microbatches)
        key = chunks, forward_step_func
        if key not in pipelines:
            pipelines[key] = make_pipeline(*key, schedule)
        pipeline, logged = pipelines[key]
        logged.clear()
        samples = [next(data_iterator) for _ in range(num_microbatches)]
        whole = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
        batch = iter([(whole, whole["labels"])])
        pipeflow.execute_pipeline(batch, pipeline, forward_only=forward_only, schedule=schedule)
        return list(logged)

    return forward_backward


def schedule_of(num_chunks: int, num_microbatches: int) -> pipeflow.Schedule:
    """1f1b, or with several chunks a rank interleaved-1f1b."""
    ranks = pipeflow.current_context().pipeline_size
    if num_chunks == 1:
        return pipeflow.make_schedule("1f1b", ranks=ranks, microbatches=num_microbatches)
    return pipeflow.make_schedule("interleaved-1f1b", ranks=ranks, microbatches=num_microbatches, chunks=num_chunks)


def make_pipeline(
    chunks: Sequence[GPTModel], forward_step_func: ForwardStep, schedule: pipeflow.Schedule
) -> tuple[pipeflow.Pipeline, list[Logged]]:
    """The pipeline, and the list in which it leaves what is logged."""
    logged: list[Logged] = []

    def criterion(output: tuple[Tensor, LossFunction], labels: Tensor) -> Tensor:
        losses, loss_func = output
        loss, values = loss_func(losses)
        logged.append({name: value.detach() for name, value in values.items()})
        return loss

    stages = nn.ModuleList(StepStage(chunk, forward_step_func) for chunk in chunks)
    return pipeflow.Pipeline(stages, schedule, criterion=criterion), logged


def save_distributed_checkpoint(path: Path, model: GPTModel) -> None:
    """Writes the model's weights to the folder `path`, all ranks together, in a form that any layout can load."""
    save_checkpoint(path, model.stage)


def load_distributed_checkpoint(path: Path, model: GPTModel) -> GPTModel:
    """Gives the model the weights that were saved, under whatever layout."""
    load_checkpoint(path, model.stage)
    return model
