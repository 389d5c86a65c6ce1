"""A Booster's files, in the format of torch.save or safetensors, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeflow.adapters.libraries import needed
from pipeflow.core.errors import UsageError
from pipeflow.core.files import replacing
from pipeflow.training.checkpoint.safetensors import Rename
from pipeflow.training.checkpoint.tensor_files import SINGLE, TensorFiles

_METADATA = {"format": "pt"}  # transformers needs it


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
    """Writes the file `path` with `write_to`. Raises UsageError if that fails, or if another kind of file is there."""
    try:
        if os.path.lexists(path) and not _is_saved(path):
            raise UsageError(f"{path} was not written by torch.save or safetensors: save to a new file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write_to(temporary)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path} could not be written: {error}") from error


def _is_saved(path: Path) -> bool:
    """True if a file begins as those of torch.save, or of safetensors, do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(9)
    return begin[:2] == b"PK" or begin[8:] == b"{"


def join(parts: Sequence[Path], path: Path, *, use_safetensors: bool) -> None:
    """Joins the safetensors files `parts`, if there are any, into one file."""
    package = _package()
    whole: dict[str, Tensor] = {}
    for part in parts:
        whole |= package.load_file(part)
    if parts:
        write(
            path, lambda file: package.save_file(whole, file, _METADATA) if use_safetensors else torch.save(whole, file)
        )


def divide(path: Path, parts: Path) -> None:
    """Converts a file of torch.save to a folder with a safetensors file. Raises UsageError if it is no state_dict."""
    package, whole = _package(), read(path)
    if not isinstance(whole, dict) or not all(isinstance(each, Tensor) for each in whole.values()):
        raise UsageError(f"{path} is not a state_dict of tensors: pass a file that save_model wrote")
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
    with needed("safetensors"):
        import safetensors.torch
    return safetensors.torch
