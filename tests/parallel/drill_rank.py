"""One rank of a drill: it trains, writes down what it was told and when, and goes on where nobody died. Started by
`test_drills`, as a function of a process or as a program on another host.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from pipeflow import Pipeline

RANKS, MICROBATCHES, WIDTH, TIMEOUT = 4, 4, 16, 5.0


@dataclass
class Told:
    """What a rank was told: in which phase, about whom (None in an error that names nobody), and when by the clock that
    all processes share.
    """

    phase: str
    rank: int | None
    died: int | None
    at: float
    message: str


def build(rank: int) -> Pipeline:
    import torch
    from torch import nn

    import pipeflow

    class Stage(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            time.sleep(0.001)
            return super().forward(hidden)

    torch.manual_seed(rank)
    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    return pipeflow.Pipeline(Stage(WIDTH, WIDTH), schedule, criterion=nn.functional.mse_loss)


def batch(step: int) -> tuple[Tensor, ...]:
    import torch

    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(2 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))


def drill(folder: str, rank: int, port: int, steps: int, address: str = "127.0.0.1") -> None:
    """Launches, takes so many steps, and leaves. After a failure in which nobody died, waits for the file `go`, then
    tries until a step works.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    import torch

    import pipeflow

    torch.set_num_threads(1)
    where, phase, context = Path(folder), "launch", None
    try:
        context = pipeflow.launch(pipeline=RANKS, timeout=TIMEOUT, device="cpu")
        phase = "build"
        model = build(rank)
        phase = "step"
        for step in range(steps):
            pipeflow.execute_pipeline(iter([batch(step)]), model)
            write(where, f"stepping-{rank}", [step])
        phase = "exit"
    except pipeflow.PipelineError as error:
        note(where, rank, phase, error, error.rank, error.died)
        if error.died is None and phase == "step":
            write(where, f"works-{rank}", try_again(model, where))
    except Exception as error:
        note(where, rank, phase, error)
    if context is not None:
        context.close()


def drill_set_up(folder: str, rank: int, port: int, name: str) -> None:
    """Trains for ever in one of the set-ups. What it prints is in the file `said` with its rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    import pipeflow
    from tests.parallel.set_ups import SET_UPS

    torch.set_num_threads(1)
    where, begun = Path(folder), time.monotonic()
    with open(where / f"said-{rank}", "w", encoding="utf-8") as said:
        os.dup2(said.fileno(), 2)
    faulthandler.enable()  # a rank that stays is aborted
    try:
        SET_UPS[name](where, lambda: write(where, f"stepping-{rank}", [begun]))
    except pipeflow.PipelineError as error:
        note(where, rank, "step", error, error.rank, error.died)
        raise
    except Exception as error:
        note(where, rank, "step", error)
        raise


def note(
    folder: Path, rank: int, phase: str, error: Exception, named: int | None = None, died: int | None = None
) -> None:
    told = Told(phase, named, died, time.monotonic(), f"{type(error).__name__}: {error}"[:300])
    write(folder, f"told-{rank}", asdict(told))


def try_again(model: Pipeline, folder: Path) -> int:
    """How many steps it takes until one works again; 0 when three do not."""
    import pipeflow

    while not (folder / "go").exists():
        time.sleep(0.05)
    for attempt in range(1, 4):
        try:
            pipeflow.execute_pipeline(iter([batch(0)]), model)
        except pipeflow.PipelineError:
            continue
        return attempt
    return 0


def write(folder: Path, name: str, value: object) -> None:
    """All at once, so that whoever reads never sees a part."""
    partial = folder / f".{name}"
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.rename(folder / name)


if __name__ == "__main__":
    folder, rank, port, steps, address = sys.argv[1:]
    drill(folder, int(rank), int(port), int(steps), address)
