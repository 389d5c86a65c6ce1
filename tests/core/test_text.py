"""Numbers as people write them: at the border of two units."""

from __future__ import annotations

import pytest

from pipeflow.core.text import count_text, seconds_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1k"), (999_499, "999k"), (999_500, "1M"), (999_499_999, "999M"), (999_500_000, "1B")],
)
def test_counts(count: int, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9999, "999.9 ms"), (0.99996, "1 s"), (-0.99996, "-1 s"), (0.00099996, "1 ms"), (0.0009999, "999.9 us")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
