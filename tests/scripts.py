"""Scripts under torchrun's variables. Each rank is forked by a server that has loaded torch and pipeflow, which takes a
twentieth of the time that starting Python takes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from pipeflow.testing.ranks import PRELOADED, free_port

DEADLINE = 180.0  # seconds


def run_ranks(script: Path, *options: str, ranks: int, folder: Path | None = None, **variables: str) -> str:
    """What the ranks of a script print, those of rank 0 first; run in `folder`, with these environment variables. It
    ends well, and says nothing on stderr.
    """
    outputs, errors = said_by_ranks(script, *options, ranks=ranks, folder=folder, **variables)
    assert errors == [""] * ranks, "".join(errors)
    return "".join(outputs)


def said_by_ranks(
    script: Path, *options: str, ranks: int, folder: Path | None = None, **variables: str
) -> tuple[list[str], list[str]]:
    """Like `run_ranks`, but returns what each rank says on stdout, and on stderr."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", **variables}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as said:
        processes = [
            context.Process(
                target=_run,
                args=(script, options, folder or Path.cwd(), Path(said, str(rank))),
                kwargs={"RANK": str(rank), "LOCAL_RANK": str(rank), **common},
                daemon=False,  # it may have workers of its own
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(DEADLINE)
        finally:
            codes = [process.exitcode for process in processes]
            for process in processes:
                process.kill()
                process.join()
        outputs = [Path(said, f"{rank}.out").read_text(encoding="utf-8") for rank in range(ranks)]
        errors = [Path(said, f"{rank}.err").read_text(encoding="utf-8") for rank in range(ranks)]
    assert codes == [0] * ranks, f"{codes}\n{''.join(errors)}\n{''.join(outputs)}"
    return outputs, errors


def _run(script: Path, options: tuple[str, ...], folder: Path, said: Path, **variables: str) -> None:
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(said.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[:0] = [str(script.parent), *variables.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = [str(script), *options]
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # which the exit of a multiprocessing child leaves out
        sys.stdout.flush()
        sys.stderr.flush()
