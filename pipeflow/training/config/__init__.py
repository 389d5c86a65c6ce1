"""Training from a configuration: its keys, and the launch and the Engine that it describes."""
