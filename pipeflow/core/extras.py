"""Extras: how the optional parts of pipeflow are installed. Must not contain: what needs them."""

from __future__ import annotations

DISTRIBUTION = "pipeflow-torch"
"""The name that pip knows pipeflow by. On the public index "pipeflow" is another package."""


def install(extra: str) -> str:
    """The command that adds an extra to the pipeflow that is installed."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
