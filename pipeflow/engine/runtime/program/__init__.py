"""Turns a rank's program into the operations that a step calls."""
