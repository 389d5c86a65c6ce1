"""`kill -9` of one of 2 ranks while they save a checkpoint a step, in turn waiting for it and writing beside
training.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn

import pipeflow
from pipeflow import latest_checkpoint, load_checkpoint
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes

RANKS, WIDTH, LAYERS = 2, 512, 4  # 8 MB of weights and Adam's states


def kill_once(folder: Path, victim: int, seconds: float) -> tuple[int | None, int]:
    """Saves into `folder` until `victim` is killed, so many seconds after its first save. Returns the step of the
    newest checkpoint, None unless it has the weights of that step; the last step that was reported done.
    """
    run_processes(save_until_killed, RANKS, str(folder), victim, seconds, may_die=(victim,))
    done = int((folder / "done").read_text(encoding="utf-8").split()[-1])
    newest, model = latest_checkpoint(folder), whole_model()
    if newest is None:
        return None, done
    step = load_checkpoint(newest, model, names=lambda _, name: name).step
    found = {value for parameter in model.parameters() for value in parameter.unique().tolist()}
    return (step if found == {float(step)} else None), done


def whole_model() -> nn.ModuleDict:
    return nn.ModuleDict({str(rank): nn.ModuleList(_layers()) for rank in range(RANKS)})


def _layers() -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // RANKS)]


def save_until_killed(folder: str, victim: int, seconds: float) -> None:
    """On every rank: goes on from the newest checkpoint; all weights of step n are n."""
    rank = current_context().pipeline_rank
    stage = nn.ModuleDict({str(rank): nn.ModuleList(_layers())})
    model = pipeflow.Pipeline(stage, pipeflow.make_schedule("gpipe", ranks=RANKS, microbatches=1))
    optimizer = torch.optim.Adam(model.parameters())
    latest = pipeflow.latest_checkpoint(folder)
    step = 0 if latest is None else pipeflow.load_checkpoint(latest, model, optimizer).step
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    first = step + 1

    try:
        while True:
            step += 1
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, step)
            asynchronous = step % 2 == 0
            path = Path(folder, f"step-{step}")
            saving = pipeflow.save_checkpoint(path, model, optimizer, step=step, keep=2, asynchronous=asynchronous)
            if asynchronous:
                time.sleep(0.005)  # as if it trained
            saving.wait()
            if rank == 0:
                with Path(folder, "done").open("a", encoding="utf-8") as note:
                    note.write(f"{step}\n")
            if step == first and rank == victim:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    except pipeflow.PipelineError as error:
        if error.died != victim:
            raise
