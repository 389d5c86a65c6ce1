"""Runs a script that was written for ColossalAI, unchanged:

    python -m pipeflow.colossalai SCRIPT ARGUMENTS
    torchrun --nproc-per-node 4 -m pipeflow.colossalai SCRIPT ARGUMENTS

In the script, `colossalai` and `megatron` are pipeflow's modules of these names, and `model_zoo` is the one in
pipeflow's examples, if they are next to the package. On a machine without a GPU, "cuda" means the CPU.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PACKAGE = Path(__file__).parents[1]
LED_HERE = ("colossalai", "megatron")


class Leading(MetaPathFinder, Loader):
    """Imports `colossalai.x` as the same module object as `pipeflow.colossalai.x`; likewise for the other packages."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in LED_HERE or find_spec(_here(fullname)) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_here(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs nothing, since the module is loaded already; restores its own spec, which the import has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _here(name: str) -> str:
    return f"{PACKAGE.name}.{name}"


class WithoutGpu(TorchFunctionMode):
    """Inside the `with` block, torch's functions use the CPU wherever the code says "cuda"."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_there, args), **{name: _there(value) for name, value in (kwargs or {}).items()})


def _there(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return torch.device("cpu")
    if isinstance(argument, str) and re.fullmatch(r"cuda(:\d+)?", argument):
        return "cpu"
    return argument


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the script named in `argv`, by default the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeflow.colossalai", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its own")
    given = parser.parse_args(argv)
    if not given.script.is_file():
        parser.error(f"there is no file {str(given.script)!r}")
    sys.meta_path.insert(0, Leading())
    sys.path.insert(0, str(given.script.resolve().parent))
    if (examples := PACKAGE.parent / "examples").is_dir():
        sys.path.append(str(examples))
    sys.argv = [str(given.script), *given.arguments]
    with nullcontext() if torch.cuda.is_available() else WithoutGpu():
        runpy.run_path(str(given.script), run_name="__main__")


if __name__ == "__main__":
    main()
