"""Drawings as files for other programs."""
