"""Several processes on this machine: a script starts itself once for each rank, as torchrun would. What is not here:
what they do.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def is_rank() -> bool:
    """Whether this process was started as one of several."""
    return "RANK" in os.environ


def start_ranks(ranks: int) -> None:
    """Runs this command line once for each rank; Ctrl-C ends them all. Ends this process when one of them failed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.ERROR)  # the ranks say what is wrong
    try:
        torchrun(["--standalone", "--signals-to-handle", "SIGTERM", "--nproc-per-node", str(ranks), *sys.argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"{Path(sys.argv[0]).name}: rank {rank} was ended by signal {-failure.exitcode}"
        sys.exit(ended if failure.exitcode < 0 else 1)
    finally:
        Console().show_cursor()  # that a rank which was ended may have hidden
