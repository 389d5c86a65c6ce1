"""Drawings as files that other programs show."""
