"""ColossalAI's ShardConfig: how a model is sharded, as a value."""

from __future__ import annotations

from inspect import signature
from typing import Any

from pipeflow.colossalai.options import Elsewhere, require_nothing_else
from pipeflow.parallel.context import current_context, is_launched

_SEQUENCES = (
    "models as they come compute with whole sequences; layers of pipeflow.tensor that you call yourself have "
    "sequence_parallel=True"
)
ELSEWHERE = {
    "pipeline_stage_manager": Elsewhere(None, "a pipeline is run by Booster, with HybridParallelPlugin(pp_size=...)"),
    "sequence_parallel_process_group": Elsewhere(None, _SEQUENCES),
    "enable_sequence_parallelism": Elsewhere(False, _SEQUENCES),
    "sequence_parallelism_mode": Elsewhere(None, _SEQUENCES),
    "enable_sequence_overlap": Elsewhere(False, _SEQUENCES),
    "make_vocab_size_divisible_by": Elsewhere(64, "vocabularies of any size are split; leave it out"),
    "gradient_checkpoint_config": Elsewhere(None, "call model.gradient_checkpointing_enable()"),
    "sp_axis": Elsewhere(None, _SEQUENCES),
    "pg_mesh": Elsewhere(None, "give tensor_parallel_process_group"),
    "inner_ring_size": Elsewhere(None, "there is no ring attention; leave it out"),
    "moe_dp_group": Elsewhere(None, "experts are not spread over ranks; leave it out"),
    "ep_group": Elsewhere(None, "experts are not spread over ranks; leave it out"),
    "fp8_communication": Elsewhere(False, "tensors are sent in their own dtype; leave it out"),
    "extra_kwargs": Elsewhere({}, "leave it out"),
}
"""Options that do nothing here, unlike other values of theirs would there."""


class ShardConfig:
    """How a model is sharded.

    Args:
        tensor_parallel_process_group: the ranks that share layers: a group of torch.distributed's whose ranks are
            neighbours, or of pipeflow's. By default the tensor ranks of the launch, and where it laid out none all
            ranks.
        enable_tensor_parallelism: whether layers are split at all.
        enable_all_optimization: fused normalization, and flash attention where the model has it; nothing that compiles.
        enable_fused_normalization: layers of root mean square normalization compute by torch's own function. Layer
            norms of torch are fused as they come.
        enable_flash_attention: attention by torch's scaled_dot_product_attention.
        enable_jit_fused: torch.compile of the model's blocks.
        parallel_output: permits to leave logits split; here they are whole either way.
        others: those of `ELSEWHERE`, with the value that asks for nothing.

    Raises UsageError for an option that there is not, and for one of the others that would change something.
    """

    def __init__(
        self,
        tensor_parallel_process_group: Any = None,
        enable_tensor_parallelism: bool = True,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        parallel_output: bool = True,
        **others: Any,
    ) -> None:
        vars(self).update(
            require_nothing_else(ShardConfig, others, ELSEWHERE, signature(ShardConfig).parameters)
        )  # policies may ask for them
        self.tensor_parallel_process_group = tensor_parallel_process_group
        self.enable_tensor_parallelism = enable_tensor_parallelism
        self.enable_all_optimization = enable_all_optimization
        self.enable_fused_normalization = enable_fused_normalization or enable_all_optimization
        self.enable_flash_attention = enable_flash_attention
        self.enable_jit_fused = enable_jit_fused
        self.parallel_output = parallel_output

    @property
    def tensor_parallel_size(self) -> int:
        """How many ranks share layers."""
        group = self.tensor_parallel_process_group
        if not self.enable_tensor_parallelism:
            return 1
        if group is None:
            return current_context().tensor_size if is_launched() else 1
        return int(group.size() if callable(group.size) else group.size)
