"""ColossalAI's `colossalai.accelerator`."""

from __future__ import annotations

import torch

from pipeflow.parallel.context import current_context

__all__ = ["get_accelerator"]


class Accelerator:
    """What this process computes on. Raises UsageError before `launch`."""

    def get_current_device(self) -> torch.device:
        """Returns this process's device, which may be the CPU."""
        return current_context().device


def get_accelerator() -> Accelerator:
    """Returns what this process computes on."""
    return Accelerator()
