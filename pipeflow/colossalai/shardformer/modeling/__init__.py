"""ColossalAI's `colossalai.shardformer.modeling`: models under its names."""
