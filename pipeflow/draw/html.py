"""html: timelines as one page."""

from __future__ import annotations

from collections.abc import Sequence

from pipeflow.core.timeline import Timeline


def html(timelines: Timeline | Sequence[Timeline], *, unit: str = "", factor: float = 1.0) -> str:
    """One self-contained page."""
    return "<!doctype html><title>pipeflow</title>"
