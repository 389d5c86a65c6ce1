"""Megatron-LM's `megatron.core.datasets.utils`."""

from __future__ import annotations


def compile_helpers() -> None:
    """Does nothing, since nothing has to be compiled here."""
