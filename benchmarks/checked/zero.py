"""DeepSpeed: ZeRO of stages 1 to 3 over two replicas, on its CPU accelerator. It needs deepspeed."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checked.llama import SIZES, STEPS, Sizes, batches, count, model, optimizer_of, total_loss
from pipeflow.checking import record

RANKS = 2


def run(folder: str, fault: str = "", sizes: Sizes = SIZES, stage: int = 1) -> None:
    """A recorded run on this rank, in bfloat16 with float32 copies if `sizes` say so."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    deepspeed = _deepspeed(rank)
    made: Any = model(sizes)
    config = {
        "train_micro_batch_size_per_gpu": sizes.batch // ranks,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": sizes.dtype == torch.bfloat16},
    }
    engine, optimizer, *_ = deepspeed.initialize(
        model=made, optimizer=optimizer_of(made), config=config, dist_init_required=False
    )
    words, labels = batches(sizes)
    mine = slice(rank * sizes.batch // ranks, (rank + 1) * sizes.batch // ranks)
    scale = 1 if fault == "mean for a sum" else ranks  # the gradients are averaged
    with record(Path(folder), engine.module, optimizer):
        for step in range(STEPS):
            loss = total_loss(engine(words[step, mine]), labels[step, mine])
            engine.backward(loss * scale / count(labels[step]))
            engine.step()


def _deepspeed(rank: int) -> Any:
    """DeepSpeed with gloo, without the kernels that it would compile."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(RANKS)}
    found: Any = import_module("deepspeed")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it has it
    found.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    return found
