"""ColossalAI's `colossalai.shardformer.policies`: which layers of a model are replaced."""
