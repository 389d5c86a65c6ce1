"""What torch.compile takes. Loaded when asked for: torch's compiler takes long to load."""

from __future__ import annotations

from typing import Any

import torch

from pipeflow.engine.torch_private import needed


def modes() -> dict[str, dict[str, Any]]:
    """For each mode of torch.compile, the options of inductor that it stands for. Documented, and private by name."""
    with needed():
        return torch._inductor.list_mode_options()


def options() -> list[str]:
    """The options of inductor. Documented, and private by name."""
    with needed():
        return torch._inductor.list_options()


__all__ = ["modes", "options"]
