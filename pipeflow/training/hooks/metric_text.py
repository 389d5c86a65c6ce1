"""Metrics as text. Must not contain: where the text goes."""

from __future__ import annotations

from collections.abc import Mapping

_SHARES = ("MFU", "bubble", "planned bubble")


def number(name: str, value: float) -> str:
    """The value of the metric `name` as text.

    >>> number("loss", 0.123456), number("samples/s", 12345.678), number("bubble", 0.25)
    ('0.1235', '12,346', '25.0%')
    """
    if name in _SHARES:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def joined(metrics: Mapping[str, float]) -> str:
    """All metrics on one line.

    >>> joined({"loss": 0.5, "learning rate": 1e-3})
    'loss = 0.5, learning rate = 0.001'
    """
    return ", ".join(f"{name} = {number(name, value)}" for name, value in metrics.items())


def items(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and values as text; the planned bubble is shown with the measured one.

    >>> items({"loss": 0.5, "bubble": 0.25, "planned bubble": 0.2})
    [('loss', '0.5'), ('bubble', '25.0% (planned 20.0%)')]
    """
    shown = {name: number(name, value) for name, value in metrics.items()}
    if {"bubble", "planned bubble"} <= set(shown):
        shown["bubble"] += f" (planned {shown.pop('planned bubble')})"
    return list(shown.items())
