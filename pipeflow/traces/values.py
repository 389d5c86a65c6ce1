"""Values of files, which may hold anything where their formats have something else. Must not contain: formats."""

from __future__ import annotations

from typing import Any

LONGEST = 2.0**63  # of a time as a number: what is longer, infinite or no number is none


def seconds(value: object, unit: float) -> float | None:
    """A time in seconds, given in units of so many seconds; None if it is no time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LONGEST < value < LONGEST:
        return None
    return value * unit


def count(value: object) -> int | None:
    """A number that counts something or identifies it; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def text(value: object) -> str:
    """A text; "" if it is none."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """An object; an empty one if it is none."""
    return value if isinstance(value, dict) else {}


def objects(holder: object, key: str) -> list[dict[str, Any]]:
    """The objects in a list of an object."""
    found = mapping(holder).get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
