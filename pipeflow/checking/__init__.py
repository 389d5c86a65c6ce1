"""Checking: a plain run and a parallel run of one training job, recorded and compared. `record` needs torch, `check`
does not. The modules, in the order of the work:

- what a rank writes down: `sketches`, `parts`, `calls`, `watching`, `recorder`
- both runs of a script: `scripts`, `scripted`
- recordings against each other: `files`, `runs`, `two_runs`, `differences`, `optimizer_steps`, `limits`
- which fault explains the first difference: `fits`, `causes`, `output_causes`, `gradient_causes`
- what is told: `findings`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.checking.causes import check
from pipeflow.checking.findings import CAUSES, Cause, Difference, Result

if TYPE_CHECKING:
    from pipeflow.checking.parts import keep_weights, take_weights
    from pipeflow.checking.recorder import Recording, record
    from pipeflow.testing.planting import plant

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
    match name:
        case "Recording" | "record":
            from pipeflow.checking import recorder

            return getattr(recorder, name)
        case "keep_weights" | "take_weights":
            from pipeflow.checking import parts

            return getattr(parts, name)
        case "plant":
            from pipeflow.testing.planting import plant

            return plant
        case _:
            raise AttributeError(f"module 'pipeflow.checking' has no attribute {name!r}")
