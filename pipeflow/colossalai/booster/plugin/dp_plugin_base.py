"""ColossalAI's `colossalai.booster.plugin.dp_plugin_base`."""

from __future__ import annotations

from pipeflow.colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin as DPPluginBase

__all__ = ["DPPluginBase"]
