"""Trains a small transformer with the names of torch.distributed.pipelining, which pipeflow's engine runs; evaluates
it, and goes on from the states that were saved.

    torchrun --nproc-per-node 2 examples/pipelining/train.py
    torchrun --nproc-per-node 2 examples/pipelining/train.py --evaluate --folder run
    torchrun --nproc-per-node 2 examples/pipelining/train.py --schedule ZBVZeroBubble
    torchrun --nproc-per-node 2 examples/pipelining/train.py --library torch.distributed.pipelining

The last line runs the same program on torch's own engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORDS, WIDTH, LENGTH, SAMPLES, HELD_OUT, MICROBATCHES = 50, 32, 16, 16, 8, 8


def layers() -> nn.Sequential:
    """A language model; the same values on every rank."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def main() -> None:
    """Trains a few steps, in which each word predicts the one that follows it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1F1B", help="a name of torch or of pipeflow")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--evaluate", action="store_true", help="at the end, the loss of held-out words")
    parser.add_argument("--folder", type=Path, help="save each rank's state there at the end, and go on from it")
    parser.add_argument("--library", default="pipeflow.pipelining")
    arguments = parser.parse_args()
    library, schedules = (import_module(arguments.library + part) for part in ("", ".schedules"))
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = schedules.get_schedule_class(arguments.schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    total = ranks * (1 + several)
    own = [rank, total - 1 - rank if "V" in arguments.schedule.upper() else rank + ranks][: 1 + several]
    model, cuts = layers(), [round(6 * stage / total) for stage in range(total + 1)]
    stages = [
        library.PipelineStage(model[cuts[stage] : cuts[stage + 1]], stage, total, torch.device("cpu")) for stage in own
    ]
    schedule = kind(stages if several else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_fn)
    modules = nn.ModuleList(stage.submod for stage in stages)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=3e-3)
    first, saved = 0, arguments.folder and arguments.folder / f"rank{rank}.pt"
    if saved and saved.exists():
        state = torch.load(saved)
        first = state["steps"]
        modules.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    words = torch.arange((SAMPLES + HELD_OUT) * (LENGTH + 1)).remainder(WORDS).view(-1, LENGTH + 1)

    def run(call: Callable[..., object], rows: Tensor) -> str | None:
        """The mean loss of these rows, on the rank that has the last stage."""
        losses: list[Tensor] = []
        inputs = (rows[:, :-1],) if 0 in own else ()
        call(*inputs, target=rows[:, 1:] if total - 1 in own else None, losses=losses, return_outputs=False)
        return f"{torch.stack(losses).mean():.4f}" if losses else None

    for step in range(first, arguments.steps):
        optimizer.zero_grad()
        loss = run(schedule.step, words[:SAMPLES])
        optimizer.step()
        if loss and (step % 5 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {loss}", flush=True)
    if arguments.evaluate and (loss := run(schedule.eval, words[SAMPLES:])):
        print(f"held out: loss {loss}", flush=True)
    if saved:
        saved.parent.mkdir(exist_ok=True)
        state = {"model": modules.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"steps": arguments.steps, **state}, saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
