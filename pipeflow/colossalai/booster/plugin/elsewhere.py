"""The options of ColossalAI's HybridParallelPlugin that do nothing here."""

from __future__ import annotations

from pipeflow.colossalai.options import Elsewhere

_BUCKETS = "sizes of buckets do not change results; leave it out"
ELSEWHERE = {
    "sp_size": Elsewhere(1, "sequences are split over the tensor ranks alone, in layers of pipeflow.tensor"),
    "broadcast_buffers": Elsewhere(True, "buffers are made alike when a Pipeline is made; leave it out"),
    "ddp_bucket_cap_mb": Elsewhere(25, _BUCKETS),
    "find_unused_parameters": Elsewhere(False, "parameters without a gradient are found by themselves; leave it out"),
    "check_reduction": Elsewhere(False, "every step checks it; leave it out"),
    "gradient_as_bucket_view": Elsewhere(False, "leave it out"),
    "static_graph": Elsewhere(False, "leave it out"),
    "zero_bucket_size_in_m": Elsewhere(12, _BUCKETS),
    "cpu_offload": Elsewhere(False, "optimizer states stay on the device; spread them with zero_stage=1"),
    "communication_dtype": Elsewhere(None, "gradients are summed in their own dtype; leave it out"),
    "overlap_communication": Elsewhere(True, "sums always run beside computations; leave it out"),
    "scheduler_nodes": Elsewhere(None, "pp_style='zbv' has its order from pipeflow.make_schedule"),
    "gradient_checkpoint_config": Elsewhere(None, "call model.gradient_checkpointing_enable() before boost"),
    "enable_metadata_cache": Elsewhere(True, "shapes are sent along with every batch; leave it out"),
    "make_vocab_size_divisible_by": Elsewhere(64, "vocabularies of any size are split; leave it out"),
    "dp_outside": Elsewhere(True, "replicas are outermost; leave it out"),
    "overlap_p2p": Elsewhere(True, "transfers always run beside computations; leave it out"),
    "overlap_allgather": Elsewhere(False, "leave it out"),
    "fp8_communication": Elsewhere(False, "tensors are sent in their own dtype; leave it out"),
    "use_fp8": Elsewhere(False, "use precision='bf16'"),
    "inner_ring_size": Elsewhere(None, "there is no ring attention; leave it out"),
}
"""Each with the value that asks for nothing, and what to do where another one was wanted."""
