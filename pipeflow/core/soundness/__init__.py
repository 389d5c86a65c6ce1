"""Checks whether a schedule, and the programs made from it, can run to their end: pure functions."""
