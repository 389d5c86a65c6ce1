"""Models of transformers in pipelines: loading, training and saving, where each rank creates and loads only its own
weights. The library is an optional extra, `huggingface`; it is imported when a function here first needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.huggingface.generation.text import generate
from pipeflow.huggingface.model.loading import from_config, from_pretrained
from pipeflow.huggingface.model.saving import save_pretrained

if TYPE_CHECKING:
    from pipeflow.huggingface.training.trainer import Trainer, pipelined

__all__ = ["Trainer", "from_config", "from_pretrained", "generate", "pipelined", "save_pretrained"]


def __getattr__(name: str) -> object:
    """The Trainer and `pipelined`; the class is made on first use, since it derives from transformers' Trainer."""
    if name not in ("Trainer", "pipelined"):
        raise AttributeError(f"module 'pipeflow.huggingface' has no attribute {name!r}")
    from pipeflow.huggingface.training.refusals import require_libraries

    require_libraries()
    from pipeflow.huggingface.training import trainer

    return getattr(trainer, name)
