"""ColossalAI's `colossalai.nn.layer`."""
