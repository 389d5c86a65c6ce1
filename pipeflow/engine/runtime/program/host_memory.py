"""HostMemory: the memory of the host that takes what is offloaded: on a GPU pinned memory, on a CPU memory or files."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError


class HostMemory:
    """Where a rank on `device` puts what it offloads.

    Attributes:
        folder: the folder of the files, each of which is gone when its tensors are; None for memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.folder: Path | None = None

    def use(self, folder: str | os.PathLike[str] | None) -> None:
        """Puts what is offloaded from now on into files of a folder. Raises UsageError if there is no such folder, and
        for a rank on a GPU.
        """
        if folder is not None and self._device.type != "cpu":
            raise UsageError(f"offload_folder is for ranks on CPUs, but this one is on {self._device}: set it to None")
        if folder is not None and not Path(folder).is_dir():
            raise UsageError(f"offload_folder: there is no folder {os.fspath(folder)}: make it first")
        self.folder = None if folder is None else Path(folder)

    def empty(self, size: int) -> Tensor:
        """So many bytes. Raises UsageError if the disk is full."""
        if self.folder is None:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        try:
            with TemporaryFile(dir=self.folder) as file:  # it has no name: the system frees it with its last use
                os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would end the process at a write
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            raise UsageError(
                f"offload_folder {self.folder}: {error.strerror}, but {size} bytes of a microbatch go there: choose "
                "another folder"
            ) from None
