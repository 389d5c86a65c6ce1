"""accelerate's loop through a pipeline."""
