"""Checking: a plain run and a parallel run of one training job, recorded and compared. `record` needs torch, `check`
does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.checking.diagnosis import check
from pipeflow.checking.findings import CAUSES, Cause, Difference, Result

if TYPE_CHECKING:
    from pipeflow.checking.planting import plant
    from pipeflow.checking.recorder import Recording, record
    from pipeflow.checking.weights import keep_weights, take_weights

__all__ = [
    "CAUSES",
    "Cause",
    "Difference",
    "Recording",
    "Result",
    "check",
    "keep_weights",
    "plant",
    "record",
    "take_weights",
]


def __getattr__(name: str) -> Any:
    if name in ("Recording", "record"):
        from pipeflow.checking import recorder

        return getattr(recorder, name)
    if name in ("keep_weights", "take_weights"):
        from pipeflow.checking import weights

        return getattr(weights, name)
    if name == "plant":
        from pipeflow.checking.planting import plant

        return plant
    raise AttributeError(f"module 'pipeflow.checking' has no attribute {name!r}")
