"""`kill -9` of one of 2 ranks at a random moment while they save a checkpoint a step, in turn waiting for it and
writing beside training: does the newest checkpoint load, whole, and is none lost that had been reported done?
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Report

if TYPE_CHECKING:
    from torch import nn

RANKS, WIDTH, LAYERS = 2, 512, 4  # 8 MB of weights and Adam's states


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 20
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch tells of every connection that closes
    title = f"kill: {RANKS} ranks, kill -9 of one while they save, {rounds} rounds"
    report = Report("kill", title, ["", "rounds", "saves cut short", "newest loads", "done and lost"])
    choices = random.Random(0)
    loads = cut = lost = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(rounds):
            loaded, cut_short, done = kill_once(folder, choices.randrange(RANKS), choices.uniform(0.0, 0.4))
            loads += loaded is not None
            cut += cut_short
            lost += loaded is None or loaded < done
    report.rows.append(["kill -9", *map(str, (rounds, cut, loads, lost))])
    report.data = {"rounds": rounds, "loads": loads, "cut short": cut, "lost": lost}
    report.notes.append("cut short: begun and not reported done")
    return report


def kill_once(folder: Path, victim: int, seconds: float) -> tuple[int | None, bool, int]:
    """Saves into `folder` until `victim` is killed, so many seconds after its first save. Returns the step of the
    newest checkpoint, None unless it has the weights of that step; whether a save was cut short; the last step done.
    """
    from pipeflow import latest_checkpoint, load_checkpoint
    from pipeflow.testing import run_processes

    run_processes(save_until_killed, RANKS, str(folder), victim, seconds, may_die=(victim,))
    begun, done = (int((folder / name).read_text().split()[-1]) for name in ("begun", "done"))
    newest, model = latest_checkpoint(folder), whole_model()
    if newest is None:
        return None, begun > done, done
    step = load_checkpoint(newest, model, names=lambda _, name: name).step
    found = {value for parameter in model.parameters() for value in parameter.unique().tolist()}
    return (step if found == {float(step)} else None), begun > done, done


def whole_model() -> nn.ModuleDict:
    from torch import nn

    return nn.ModuleDict({str(rank): nn.ModuleList(_layers()) for rank in range(RANKS)})


def _layers() -> list[nn.Linear]:
    from torch import nn

    return [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // RANKS)]


def save_until_killed(folder: str, victim: int, seconds: float) -> None:
    """On every rank: goes on from the newest checkpoint; all weights of step n are n."""
    import torch
    from torch import nn

    import pipeflow
    from pipeflow.parallel.context import current_context

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

    def tell(what: str, step: int) -> None:
        if rank == 0:
            with Path(folder, what).open("a") as note:
                note.write(f"{step}\n")

    try:
        while True:
            step += 1
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, step)
            tell("begun", step)
            asynchronous = step % 2 == 0
            path = Path(folder, f"step-{step}")
            saving = pipeflow.save_checkpoint(path, model, optimizer, step=step, keep=2, asynchronous=asynchronous)
            if asynchronous:
                time.sleep(0.005)  # as if it trained
            saving.wait()
            tell("done", step)
            if step == first and rank == victim:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    except pipeflow.PipelineError as error:
        if error.died != victim:
            raise
