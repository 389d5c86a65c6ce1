"""ColossalAI's `colossalai.booster.plugin`: plugins that say how a Booster makes a model parallel."""

from __future__ import annotations

from pipeflow.colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin
from pipeflow.colossalai.booster.plugin.replicated import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin

__all__ = ["GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin", "TorchDDPPlugin"]
