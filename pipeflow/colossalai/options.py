"""ColossalAI's options that have no effect here; other values than their defaults raise an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pipeflow.core.errors import UsageError, unknown


class Elsewhere(NamedTuple):
    """An option without effect.

    Attributes:
        default: the value that has no effect, and is accepted.
        instead: what to do instead of another value.
    """

    default: Any
    instead: str


def require_nothing_else(
    owner: type, others: Mapping[str, Any], elsewhere: Mapping[str, Elsewhere], own: Collection[str]
) -> dict[str, Any]:
    """Checks the options `others` that the class `owner` got besides its `own`. Returns the values of all options in
    `elsewhere`, which are their defaults.

    Raises UsageError for an unknown option (with the nearest name), and for a value that is not the default.
    """
    for name, value in others.items():
        if name not in elsewhere:
            raise unknown(f"option of {owner.__name__}", name, [*own, *elsewhere])
        if value != elsewhere[name].default:
            raise UsageError(f"{owner.__name__} does not support {name}={value!r}: {elsewhere[name].instead}")
    return {name: each.default for name, each in elsewhere.items()}
