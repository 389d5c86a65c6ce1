"""Checking: a plain run and a parallel run of one training job, recorded and compared. `record` needs torch, `check`
does not. The modules, in the order of the work:

- what a rank writes down: `sketches`, `parts`, `watching`, `recorder`
- both runs of a script: `scripts`, `scripted`
- recordings against each other: `files`, `runs`, `two_runs`, `differences`; `limits` has every threshold
- which fault explains the first difference: `fits`, `causes`, `output_causes`, `gradient_causes`
- what is told: `findings`
"""

from __future__ import annotations

from importlib import import_module
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


_NEED_TORCH = {
    "Recording": "pipeflow.checking.recorder",
    "record": "pipeflow.checking.recorder",
    "keep_weights": "pipeflow.checking.parts",
    "take_weights": "pipeflow.checking.parts",
    "plant": "pipeflow.testing.planting",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'pipeflow.checking' has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)
