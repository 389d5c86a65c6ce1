"""ColossalAI's `colossalai.utils.model`."""
