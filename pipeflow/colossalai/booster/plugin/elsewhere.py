"""The options of ColossalAI's HybridParallelPlugin that have no effect here."""

from __future__ import annotations

from pipeflow.colossalai.options import Elsewhere

_BUCKETS = "bucket sizes do not change results; remove it"
ELSEWHERE = {
    "sp_size": Elsewhere(1, "sequences are split only over the tensor ranks, by layers of pipeflow.tensor"),
    "broadcast_buffers": Elsewhere(True, "buffers are made equal when a Pipeline is made; remove it"),
    "ddp_bucket_cap_mb": Elsewhere(25, _BUCKETS),
    "find_unused_parameters": Elsewhere(False, "parameters without a gradient are found automatically; remove it"),
    "check_reduction": Elsewhere(False, "every step checks it; remove it"),
    "gradient_as_bucket_view": Elsewhere(False, "leave it out"),
    "static_graph": Elsewhere(False, "leave it out"),
    "zero_bucket_size_in_m": Elsewhere(12, _BUCKETS),
    "communication_dtype": Elsewhere(None, "gradients are summed in their own dtype; remove it"),
    "overlap_communication": Elsewhere(True, "reductions always overlap computations; remove it"),
    "scheduler_nodes": Elsewhere(None, "pp_style='zbv' takes its order from pipeflow.make_schedule; remove it"),
    "gradient_checkpoint_config": Elsewhere(None, "call model.gradient_checkpointing_enable() before boost"),
    "overlap_allgather": Elsewhere(False, "leave it out"),
    "fp8_communication": Elsewhere(False, "tensors are sent in their own dtype; remove it"),
    "use_fp8": Elsewhere(False, "use precision='bf16'"),
    "inner_ring_size": Elsewhere(None, "there is no ring attention; remove it"),
}
"""Each with the value that has no effect, and what to do instead of another value."""
