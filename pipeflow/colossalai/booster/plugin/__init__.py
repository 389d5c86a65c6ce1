"""ColossalAI's `colossalai.booster.plugin`: plugins that say how a Booster makes a model parallel."""

from __future__ import annotations

from pipeflow.colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin

__all__ = ["HybridParallelPlugin"]
