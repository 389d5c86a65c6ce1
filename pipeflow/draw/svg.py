"""svg: a timeline as a standalone SVG."""

from __future__ import annotations

from pipeflow.core.timeline import Timeline


def svg(timeline: Timeline, *, unit: str = "", factor: float = 1.0) -> str:
    """A standalone SVG."""
    return '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>'
