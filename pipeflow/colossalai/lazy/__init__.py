"""ColossalAI's `colossalai.lazy`: models whose parameters are made when it is known which rank owns them."""

from __future__ import annotations

from pipeflow.colossalai.lazy.lazy_init import LazyInitContext

__all__ = ["LazyInitContext"]
