"""A rank's program as the operations that a step calls."""
