"""Megatron-LM's `megatron.core.models.gpt`: this rank's stage of a GPT, and the kind of its layers; and
`megatron.core.dist_checkpointing`: saves and loads a model's weights as pipeflow's checkpoints, under any layout.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import partition_uniform
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.tensor.cross_entropy import vocab_parallel_cross_entropy
from pipeflow.megatron.parallel_state import (
    chunk_of,
    context_here,
    get_virtual_pipeline_model_parallel_world_size,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    seed_of_weights,
)
from pipeflow.megatron.tensor_parallel import TransformerConfig
from pipeflow.training.checkpoint import state
from pipeflow.training.checkpoint.load import load_checkpoint
from pipeflow.training.checkpoint.pieces import Names
from pipeflow.training.checkpoint.save import save_checkpoint
from pipeflow.training.models import GPTBlock, GPTStage, begin, tie


class ShardedStateDict(dict[str, Tensor]):
    """A rank's weights by name, and their module, which knows how they are split over ranks."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        super().__init__({prefix + name: value for name, value in module.state_dict().items()})
        self.module, self.prefix = module, prefix


def save(sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Saves weights with `pipeflow.save_checkpoint`. All ranks call it together.

    Args:
        sharded_state_dict: the result of a model's `sharded_state_dict()`, or a dict of several, one per stage.
        checkpoint_dir: folder on storage that all ranks share; its contents are replaced.

    Raises UsageError for other contents of the dict, and as `save_checkpoint` does.
    """
    parts = _parts(sharded_state_dict)
    save_checkpoint(checkpoint_dir, nn.ModuleList(part.module for part in parts), names=_names(parts))


def load(sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Loads a checkpoint and returns this rank's weights, for the models' `load_state_dict`. The models themselves and
    random states are not changed. All ranks call it together.

    Args:
        sharded_state_dict: as in `save`.
        checkpoint_dir: the folder.

    Raises UsageError as `save` and `load_checkpoint` do.
    """
    parts = _parts(sharded_state_dict)
    copies = nn.ModuleList(copy.deepcopy(part.module) for part in parts)
    context = context_here()
    random = state.random_states(context)
    load_checkpoint(checkpoint_dir, copies, names=_names(parts))
    state.restore_random(context, random)
    loaded = [dict(ShardedStateDict(module, part.prefix)) for module, part in zip(copies, parts, strict=True)]
    if isinstance(sharded_state_dict, ShardedStateDict):
        return dict(loaded[0])
    return dict(zip(sharded_state_dict, loaded, strict=True))


def _parts(sharded_state_dict: Mapping[str, Any]) -> list[ShardedStateDict]:
    if isinstance(sharded_state_dict, ShardedStateDict):
        return [sharded_state_dict]
    for key, part in sharded_state_dict.items():
        if not isinstance(part, ShardedStateDict):
            raise UsageError(
                f"the entry {key!r} is not a model's sharded_state_dict(): use pipeflow.save_checkpoint for optimizers "
                "and other values"
            )
    return list(sharded_state_dict.values())


def _names(parts: Sequence[ShardedStateDict]) -> Names:
    """Names of tensors without the index of a part's module in the list of all parts."""

    def name_of(stage: int, name: str) -> str:
        index, _, own = name.partition(".")
        return parts[int(index)].prefix + own

    return name_of


class GPTModel(GPTStage):
    """This rank's stage of a GPT, a `pipeflow.models.GPTStage`. Initial weights depend only on their names and on the
    seed of `model_parallel_cuda_manual_seed` (torch's seed if that was not called), so the whole model is the same
    under every layout.

    Args:
        config: sizes and settings of the model.
        transformer_layer_spec: the kind of layer, from `get_gpt_layer_local_spec()`.
        vocab_size: number of tokens in the vocabulary.
        max_sequence_length: maximum length of a sequence.
        pre_process, post_process: whether the stage has the embedding, and the head; by default according to its place.
        share_embeddings_and_output_weights: tie the token embedding to the head, also if they are on different ranks.
        position_embedding_type: must be "learned_absolute".
        vp_stage: index of the stage on this rank if it has several; by default the one set with
            `set_virtual_pipeline_model_parallel_rank`.

    Raises UsageError if the configuration does not fit the layout, and for another kind of layer or positions.
    """

    shares_tokens = False  # a script of Megatron-LM computes its loss itself

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: type[nn.Module],
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        *,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        vp_stage: int | None = None,
    ) -> None:
        context, chunks = context_here(), get_virtual_pipeline_model_parallel_world_size() or 1
        first, last = is_pipeline_first_stage(vp_stage=vp_stage), is_pipeline_last_stage(vp_stage=vp_stage)
        _require_fits(config, context)
        if transformer_layer_spec is not GPTBlock:
            raise UsageError(f"the only kind of layer is get_gpt_layer_local_spec(), got {transformer_layer_spec!r}")
        if position_embedding_type != "learned_absolute":
            raise UsageError(f"position_embedding_type must be 'learned_absolute', got {position_embedding_type!r}")
        _require_place(first, last, pre_process, post_process)
        placement = Placement.looped(context.pipeline_size, chunks)
        stage = placement.stages_of(context.pipeline_rank)[chunk_of(vp_stage)]
        [(start, end)] = partition_uniform(config.num_layers, placement.num_stages)[stage]
        options = {**_options_of(config), "vocab_size": vocab_size, "max_position_embeddings": max_sequence_length}
        with torch.device("meta"):
            super().__init__(end - start, first=first, last=last, start=start, **options)
        tied, device = share_embeddings_and_output_weights, "cpu" if config.use_cpu_initialization else context.device
        seed, std = seed_of_weights(), config.init_method_std
        begin(self, config.num_layers, seed=seed, device=device, std=std, tied=tied)
        if tied:
            tie([self], placement)
        self.config, self.vocab_size, self.max_sequence_length = config, vocab_size, max_sequence_length
        self.pre_process, self.post_process = first, last
        self._input: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | Sequence[Tensor | None] | None) -> None:
        """Sets the input of the next call: the previous stage's output (batch, sequence, hidden), or a list with it."""
        if isinstance(input_tensor, Tensor | None):
            self._input = input_tensor
        else:
            [self._input] = input_tensor

    def forward(  # type: ignore[override]  # as there
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, *, labels: Tensor | None = None
    ) -> Tensor:
        """Runs the stage. The last stage returns each token's loss (batch, sequence), or without `labels` the logits
        (batch, sequence, this rank's part of the vocabulary); other stages return the next stage's input.

        Args:
            input_ids, position_ids, labels: (batch, sequence).
            attention_mask: bool (batch, 1, sequence, sequence), True where a token must not attend; None is causal.
        """
        hidden_states, self._input = self._input, None
        seen = None if attention_mask is None else ~attention_mask
        output = super().forward(hidden_states, input_ids, seen, position_ids)
        if self.head is None or labels is None:
            return output
        return vocab_parallel_cross_entropy(output, labels, vocab_size=self.vocab_size, reduction="none")

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[()] = (), metadata: None = None) -> Any:
        """Returns this rank's weights by `prefix` + their names in the whole model, for `dist_checkpointing`."""
        return ShardedStateDict(self, prefix)


def _options_of(config: TransformerConfig) -> Mapping[str, Any]:
    """The options of a GPTStage. Raises UsageError for sizes that it does not support."""
    wide = config.ffn_hidden_size or 4 * config.hidden_size
    if wide % config.hidden_size:
        raise UsageError(f"ffn_hidden_size={wide} must be a multiple of hidden_size={config.hidden_size}")
    if config.recompute_granularity not in (None, "full"):
        raise UsageError(f"recompute_granularity must be None or 'full', got {config.recompute_granularity!r}")
    return {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "mlp_ratio": wide // config.hidden_size,
        "act_func": config.activation_func,
        "embed_drop_rate": config.hidden_dropout,
        "attn_drop_rate": config.attention_dropout,
        "drop_rate": config.hidden_dropout,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "dtype": config.params_dtype,
        "checkpoint": config.recompute_granularity == "full",
        "sequence_parallel": config.sequence_parallel,
    }


def _require_fits(config: TransformerConfig, context: Context) -> None:
    sizes = {"tensor": context.tensor_size, "pipeline": context.pipeline_size}
    for name, size in sizes.items():
        said = getattr(config, f"{name}_model_parallel_size")
        if said not in (1, size):
            raise UsageError(f"the configuration has {name}_model_parallel_size={said}, but {size} was initialized")
    if context.pipeline_size > 1 and config.pipeline_dtype not in (None, config.params_dtype):
        raise UsageError(
            f"pipeline_dtype must be the weights' dtype, {config.params_dtype}, since stages exchange tensors of it; "
            f"got {config.pipeline_dtype}"
        )


def _require_place(first: bool, last: bool, pre_process: bool | None, post_process: bool | None) -> None:
    said = {"pre_process": (pre_process, first), "post_process": (post_process, last)}
    for name, (value, place) in said.items():
        if value not in (None, place):
            raise UsageError(f"{name} must be {place} for this stage, got {value}: correct or remove it")


def get_gpt_layer_local_spec() -> type[GPTBlock]:
    """Returns the only kind of layer, `pipeflow.models.GPTBlock`."""
    return GPTBlock
