"""Lightning's loops through a pipeline."""
