"""Traces that other engines recorded: read, and rebuilt as a timeline."""
