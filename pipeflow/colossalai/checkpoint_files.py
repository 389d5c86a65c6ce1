"""A Booster's files, in the format of torch.save or safetensors, written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeflow.checkpoint.renames import Rename
from pipeflow.checkpoint.tensor_files import SINGLE, TensorFiles
from pipeflow.core.errors import UsageError
from pipeflow.core.files import replacing

_METADATA = {"format": "pt"}  # transformers needs it


def beside(path: Path) -> Path:
    """A hidden folder for parts of the file `path`."""
    return path.with_name(f".{path.name}.parts")


def is_of_torch(path: Path) -> bool:
    """True if torch.save wrote the file. Raises UsageError if it does not exist."""
    if not path.is_file():
        raise UsageError(f"there is no file or folder {str(path)!r}")
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def read(path: Path) -> Any:
    """Reads plain values and tensors that torch.save wrote. Raises UsageError for anything else."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"{path} was not written by torch.save, or is damaged: {error}") from error


def write(path: Path, write_to: Callable[[Path], object]) -> None:
    """Writes the file `path` with `write_to`. Raises UsageError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write_to(temporary)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path} could not be written: {error}") from error


def join(parts: Path, path: Path, *, use_safetensors: bool) -> None:
    """Joins the safetensors files in the folder `parts` into one file, and removes the folder."""
    package = _package()
    whole: dict[str, Tensor] = {}
    for part in sorted(parts.glob("*.safetensors")):
        whole |= package.load_file(part)
    write(path, lambda file: package.save_file(whole, file, _METADATA) if use_safetensors else torch.save(whole, file))
    shutil.rmtree(parts)


def divide(path: Path, parts: Path) -> None:
    """Converts a file of torch.save to a folder with a safetensors file. Raises UsageError if it is no state_dict."""
    package, whole = _package(), read(path)
    if not isinstance(whole, dict) or not all(isinstance(each, Tensor) for each in whole.values()):
        raise UsageError(f"{path} is not a state_dict of tensors: pass a file that save_model wrote")
    parts.mkdir(exist_ok=True)
    package.save_file({name: each.clone().contiguous() for name, each in whole.items()}, parts / SINGLE, _METADATA)


def renames(path: Path, tied: Iterable[Sequence[str]]) -> list[Rename]:
    """Renames for tied weights that the safetensors files have under one of their names alone, as transformers' have.

    Args:
        path: a file, or a folder.
        tied: all names of each weight.
    """
    there = TensorFiles(path).files
    found = [(names, [name for name in names if name in there]) for names in tied]
    return [Rename(name, known[0]) for names, known in found if known for name in names if name not in known]


def _package() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("this needs the package safetensors: pip install safetensors") from error
    return safetensors.torch
