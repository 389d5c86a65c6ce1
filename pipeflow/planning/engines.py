"""Engine: what a training program keeps on a device beside the tensors that every program needs, what surrounds them
there, and what differs in the work of its steps. Must not contain: sizes of models.

Sources:

- Megatron-LM frees a stage's output as soon as it is sent, and adds up gradients in float32 as they are computed
  (`deallocate_pipeline_outputs`, `gradient_accumulation_fusion`).
- Megatron-LM has gradients and gathered weights in one buffer (`_ParamAndGradBuffer`). FSDP copies those of each layer.
- DeepSpeed keeps a stage's output until its backward, and gradients in 16 bits beside their float32 sums in bf16
  (`_exec_backward_pass` of deepspeed/runtime/pipe/engine.py calls `update_hp_grads(clear_lp_grads=False)`). With ZeRO,
  it reduces gradients in a buffer of 5e8 numbers (`reduce_bucket_size`), and in two of them with `overlap_comm`.
- The loss of Megatron-LM has logits in 16 bits and in float32 beside its softmax, as Megatron-DeepSpeed does. torch's
  cross_entropy has logits in 16 bits and two float32 gradients beside the logarithms of its softmax; 16-bit logits are
  freed before, but leave a hole too small for a gradient. A compiled loss has 16-bit logits and their gradients alone;
  torchtitan compiles it since 2025 (`build_cross_entropy_loss`). Over tensor ranks, torch's loss_parallel has one more
  (`_nll_loss_and_log_softmax_backward` of torch/distributed/tensor/parallel/loss.py).
- torch.distributed.pipelining keeps a stage's output until its backward, and the last stage its logits until the end of
  the step (`output_chunks`). It makes a buffer for every microbatch that a stage receives, which the first layer's
  input is, and one for every gradient (`_prepare_forward_infra`, `_prepare_backward_infra`).
- FSDP2 divides float32 weights and gradients, and casts what it gathers. Without resharding, gradients of a stage are
  whole from its first backward to its last (`unsharded_accumulated_grad`), in the type of their reduction, which is
  float32 in torchtitan. Divided gradients are made on a stream of their own, so they take no memory that others freed.
- DTensor has the gradient of a word table that tensor ranks share for all words on each of them, until FSDP2 divides
  it (`embedding_dense_backward_strategy` of torch/distributed/tensor/_ops/_embedding_ops.py shards no rows).
- torchtitan's tensor parallelism gathers a sequence before the linears, whose autograd keeps what they got; Megatron-LM
  gathers it again in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

CONTEXT = 2**29
"""Bytes of a CUDA context with its kernels: 0.4 to 0.6 GiB on V100 to H100."""
COMMUNICATOR = 688 * 2**20
"""Bytes of an NCCL communicator, as measured on A100 with NVLink for 3 or 4 devices; for 2 devices it is 544 MiB
(NVIDIA/nccl#964)."""


class EngineMemory(NamedTuple):
    """What a program keeps.

    Attributes:
        both_gradients: gradients in 16 bits stay beside their float32 sums, unless `zero` divides gradients.
        float32_sums: pipeline ranks that divide anything add up whole gradients in float32. With `zero` 3, a stage's
            are whole from its first backward to its last.
        whole_tables: the first stage's gradient of the word table, where it is whole, is so on every tensor rank.
        keeps_outputs: a stage keeps its output until its backward.
        one_buffer: gradients and gathered weights lie in one buffer, so their collectives reach what others do.
        buffers_all: a stage has buffers for all that it receives in a step, and the last one keeps all logits.
        gathers_inputs: with sequence parallelism, linears keep their inputs as gathered, and not the device's part.
        bucket: numbers in the buffer in which divided gradients are reduced.
        loss: bytes of a logit in the loss, beside the four that are kept until its backward.
        loss_parts: the same where tensor ranks share the logits.
    """

    both_gradients: bool = False
    float32_sums: bool = False
    whole_tables: bool = False
    keeps_outputs: bool = False
    one_buffer: bool = False
    buffers_all: bool = False
    gathers_inputs: bool = False
    bucket: int = 0
    loss: int = 0
    loss_parts: int = 0


_TITAN = EngineMemory(
    float32_sums=True,
    whole_tables=True,
    keeps_outputs=True,
    buffers_all=True,
    gathers_inputs=True,
    loss=10,
    loss_parts=14,
)
ENGINES: Mapping[str, EngineMemory] = MappingProxyType(
    {
        "megatron": EngineMemory(one_buffer=True, loss=6, loss_parts=6),
        "torchtitan": _TITAN,
        "torchtitan-compiled": _TITAN._replace(loss=0),
        "deepspeed": EngineMemory(both_gradients=True, keeps_outputs=True, bucket=500_000_000, loss=6, loss_parts=6),
    }
)
"""By the names that `pipeflow plan --engine` takes."""


def engine_named(name: str | None) -> EngineMemory:
    """The entry of ENGINES with this name; without a name, an engine that keeps nothing of its own."""
    return EngineMemory() if name is None else ENGINES[name]
