"""Models of transformers in pipelines: loading, training and saving, where each rank creates and loads only its own
weights. The library is an optional extra, `huggingface`; it is imported when a function here first needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.adapters.huggingface.generation import generate
from pipeflow.adapters.huggingface.pretrained import from_config, from_pretrained, save_pretrained
from pipeflow.adapters.huggingface.shared_tokens import CausalLMLoss, MaskedLMLoss, share_tokens
from pipeflow.adapters.libraries import needed, transformers_library

if TYPE_CHECKING:
    from pipeflow.adapters.huggingface.trainer import Trainer, pipelined

__all__ = [
    "CausalLMLoss",
    "MaskedLMLoss",
    "Trainer",
    "from_config",
    "from_pretrained",
    "generate",
    "pipelined",
    "save_pretrained",
    "share_tokens",
]


def __getattr__(name: str) -> object:
    """The Trainer and `pipelined`; the class is made on first use, since it derives from transformers' Trainer."""
    if name not in ("Trainer", "pipelined"):
        raise AttributeError(f"module 'pipeflow.huggingface' has no attribute {name!r}")
    transformers_library()
    with needed("accelerate", "huggingface", who="the Trainer"):
        import accelerate  # noqa: F401  # asked for only
    from pipeflow.adapters.huggingface import trainer

    return getattr(trainer, name)
