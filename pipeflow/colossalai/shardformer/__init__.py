"""ColossalAI's `colossalai.shardformer`."""
