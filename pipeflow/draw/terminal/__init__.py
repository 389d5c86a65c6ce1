"""Drawings for a terminal, and as plain text."""
