"""JSON from elsewhere, read value by value. Must not contain: what the values mean."""

from __future__ import annotations

import json
import math
from typing import Any

from pipeflow.core.errors import UsageError


def parse(text: str) -> Any:
    """The value of a JSON text. Raises UsageError if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is not JSON: {error}") from None


def is_number(value: object) -> bool:
    """True for a finite number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: object, what: str) -> float:
    """The finite number `what`. Raises UsageError for another value."""
    if not is_number(value):
        raise UsageError(f"{what} must be a finite number, got {value!r}")
    assert isinstance(value, int | float)
    return float(value)
