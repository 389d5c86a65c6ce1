"""Starts several processes on this machine, a script once per rank as torchrun would, and shows their errors once."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from gpt3.data import DataError
from pipeflow import PipeflowError


def is_rank() -> bool:
    """True if this process was started as one of several."""
    return "RANK" in os.environ


def start_ranks(ranks: int) -> None:
    """Runs this command line once per rank; Ctrl-C ends all ranks. Exits if one of them failed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.ERROR)  # the ranks report their errors
    try:
        torchrun(["--standalone", "--signals-to-handle", "SIGTERM", "--nproc-per-node", str(ranks), *sys.argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"{Path(sys.argv[0]).name}: rank {rank} was ended by signal {-failure.exitcode}"
        sys.exit(ended if failure.exitcode < 0 else 1)
    finally:
        Console().show_cursor()  # a killed rank may have hidden it


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the script with one line, on rank 0 alone, for an error that says what to change, and for Ctrl-C."""
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        yield
    except (PipeflowError, DataError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}" if is_first else 1)
    except KeyboardInterrupt:
        sys.exit("\nstopped" if is_first else 1)
