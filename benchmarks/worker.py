"""The main program of one rank: registers the stack dump, joins the others, calls the function, writes the result."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    function, options, result = sys.argv[1:]
    module, name = function.split(":")

    import torch

    import pipeflow

    torch.set_num_threads(1)
    given = json.loads(options)
    pipeflow.launch(**given.pop("launch", {"pipeline": int(os.environ["WORLD_SIZE"])}))
    value = getattr(import_module(f"benchmarks.{module}"), name)(**given)
    Path(result).write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    main()
