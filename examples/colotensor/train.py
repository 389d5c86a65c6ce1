r"""Trains GPT-2 of transformers, split over tensor ranks parameter by parameter, with shards over the replicas.

GPUNUM=1 examples/colotensor/run.sh                                     one process
GPUNUM=4 TPDEGREE=2 examples/colotensor/run.sh --model gpt2_medium
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pipeflow
import pipeflow.colossalai as colossalai
from colotensor.model import PRESETS, GPTLMLoss, floating_point_operations, random_batch, split
from pipeflow.colossalai.logging import get_dist_logger
from pipeflow.colossalai.nn.parallel import GeminiDDP
from pipeflow.colossalai.tensor import ProcessGroup
from pipeflow.colossalai.utils import get_current_device
from pipeflow.colossalai.utils.model.colo_init_context import ColoInitContext

VOCABULARY = 50257


def main() -> None:
    arguments = read_arguments()
    colossalai.launch_from_torch(verbose=False)
    logger, device = get_dist_logger(), get_current_device()
    torch.manual_seed(0)
    with ColoInitContext(device=device):
        model = PRESETS[arguments.model](arguments.checkpoint, max_seq_len=arguments.length)
    group = ProcessGroup(tp_degree=arguments.tp_degree)
    split(model, group)
    operations = floating_point_operations(model, arguments.batch_size * arguments.length)
    spread = GeminiDDP(model, device=device, placement_policy=arguments.placement, pin_memory=True, search_range_m=32)
    optimizer, criterion = torch.optim.AdamW(spread.parameters(), lr=arguments.rate), GPTLMLoss()
    for step in range(arguments.steps):
        seed = step * group.dp_world_size() + group.dp_local_rank()
        ids, mask = (each.to(device) for each in random_batch(arguments.batch_size, arguments.length, VOCABULARY, seed))
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = criterion(spread(ids, mask), ids)
        loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - started
        memory = memory_of(device)
        rate = operations / seconds / 1e12
        logger.info(
            f"step {step + 1}: loss {loss.item():.4f}, {seconds:.2f} s, {rate:.3f} TFLOP/s, {memory:.2f} GiB", ranks=[0]
        )
    pipeflow.current_context().close()


def memory_of(device: torch.device) -> float:
    """GiB of this process at its peak: what torch allocated on a GPU, else what the system gave it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=PRESETS, default="gpt2_tiny", help="size of the model (default: %(default)s)")
    add("--tp-degree", type=int, default=1, help="number of tensor ranks; all others are replicas (default: 1)")
    add("--placement", choices=["auto", "static", "cpu", "cuda"], default="auto", help="where shards are kept")
    add("--batch-size", type=int, default=2, help="sequences per replica (default: 2)")
    add("--length", type=int, default=64, help="tokens per sequence (default: 64)")
    add("--steps", type=int, default=5, help="number of steps (default: 5)")
    add("--rate", type=float, default=1e-3, help="learning rate (default: 0.001)")
    add("--checkpoint", action="store_true", help="recompute activations")
    return parser.parse_args()


if __name__ == "__main__":
    main()
