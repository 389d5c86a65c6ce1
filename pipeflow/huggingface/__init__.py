"""Models of transformers in pipelines: loaded, trained and saved, of which each rank makes its own part alone. The
library is an optional extra, `pipeflow[huggingface]`, which is imported when a function here first needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.huggingface.generation import generate
from pipeflow.huggingface.loading import from_config, from_pretrained
from pipeflow.huggingface.saving import save_pretrained

if TYPE_CHECKING:
    from pipeflow.huggingface.trainer import Trainer

__all__ = ["Trainer", "from_config", "from_pretrained", "generate", "save_pretrained"]


def __getattr__(name: str) -> object:
    """The Trainer, whose class has to be made from that of transformers."""
    if name != "Trainer":
        raise AttributeError(f"module 'pipeflow.huggingface' has no attribute {name!r}")
    from pipeflow.huggingface.trainer_refusals import require_libraries

    require_libraries()
    from pipeflow.huggingface.trainer import Trainer

    return Trainer
