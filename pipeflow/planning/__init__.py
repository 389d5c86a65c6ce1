"""What to run, before it runs: models, what a layout of one costs, and where a model is cut."""
