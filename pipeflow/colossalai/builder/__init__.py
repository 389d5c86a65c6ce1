"""ColossalAI's `colossalai.builder`."""
