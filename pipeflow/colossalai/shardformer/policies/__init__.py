"""ColossalAI's `colossalai.shardformer.policies`: policies that say which layers of a model are replaced."""
