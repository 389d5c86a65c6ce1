"""A program whose ranks leave while others still need them: python -m tests.parallel.leaving FOLDER RANKS LEAVERS
ROUNDS TIMEOUT. It writes a JSON line per round: what each rank was told. Each rank is a child of this process, so that
its script really ends: by returning, by sys.exit, by an exception, or by os._exit.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeflow import Pipeline, PipelineError, execute_pipeline, launch, make_schedule
from pipeflow.testing.ranks import free_port

WAYS = ("return", "sys.exit", "exception", "os._exit")
HANGS = 30.0  # seconds


class LeavesError(Exception):
    """Ends the script of a rank that leaves."""


def end(how: str, told: Path) -> None:
    """Ends the script of this rank, or returns."""
    told.write_text(json.dumps({"left": time.monotonic()}), encoding="utf-8")
    if how == "exception":
        raise LeavesError
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        os._exit(0)


def run(rank: int, ranks: int, leavers: Sequence[int], how: str, timeout: float, told: Path) -> None:
    """The script of a rank: those that leave end it one after the other, as do loaders of unequal length."""
    try:
        launch(pipeline=ranks, timeout=timeout)
        pipeline = Pipeline(
            nn.Linear(2, 2), make_schedule("1f1b", ranks=ranks, microbatches=2), criterion=nn.functional.mse_loss
        )
        batch = (torch.ones(2, 2), torch.zeros(2, 2))
        execute_pipeline(iter([batch]), pipeline)
    except PipelineError as error:
        told.write_text(json.dumps({"not begun": str(error)}), encoding="utf-8")
        return
    if rank in leavers:
        time.sleep(0.002 * leavers.index(rank))
        end(how, told)
        return
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            execute_pipeline(iter([batch]), pipeline)
    except PipelineError as error:
        report = {"began": began, "told": time.monotonic(), "died": error.died, "message": str(error)}
        told.write_text(json.dumps(report), encoding="utf-8")


def play(folder: Path, ranks: int, leavers: Sequence[int], how: str, timeout: float) -> dict[str, Any] | None:
    """One round: the notes and exit codes of all ranks, and the stacks of those that hang.

    Returns None in the children, whose script then ends.
    """
    port = free_port()
    notes = [folder / f"{port}-{rank}.json" for rank in range(ranks)]
    stacks = [folder / f"{port}-{rank}.stack" for rank in range(ranks)]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(HANGS, exit=True, file=stacks[rank].open("w", encoding="utf-8"))
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            run(rank, ranks, leavers, how, timeout, notes[rank])
            return None
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return {
        "how": how,
        "notes": [json.loads(note.read_text(encoding="utf-8")) if note.exists() else {} for note in notes],
        "codes": codes,
        "stacks": [
            stack.read_text(encoding="utf-8")
            for stack in stacks
            if stack.exists() and stack.read_text(encoding="utf-8")
        ],
    }


def main() -> None:
    """Plays rounds until as many as were asked for have begun."""
    folder, ranks, leavers, rounds, timeout = sys.argv[1:]
    torch.set_num_threads(1)
    gc.freeze()  # children end sooner
    begun = 0
    while begun < int(rounds):
        how = WAYS[begun % len(WAYS)]
        result = play(Path(folder), int(ranks), [int(rank) for rank in leavers.split(",")], how, float(timeout))
        if result is None:
            return
        begun += not any("not begun" in note for note in result["notes"])
        sys.stdout.write(f"{json.dumps(result)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
