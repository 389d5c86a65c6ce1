"""Drawings for a terminal, with colours or as plain text."""
