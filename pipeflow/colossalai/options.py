"""Options of ColossalAI's that do nothing here, refused by name unless they have the value that asks for nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pipeflow.core.errors import UsageError, unknown


class Elsewhere(NamedTuple):
    """An option that is not honoured.

    Attributes:
        default: the value that asks for nothing, and is taken.
        instead: what to do where another value was wanted.
    """

    default: Any
    instead: str


def require_nothing_else(
    owner: type, others: Mapping[str, Any], elsewhere: Mapping[str, Elsewhere], own: Collection[str]
) -> dict[str, Any]:
    """The values of all options in `elsewhere`, which are their defaults. `others` are the keywords that `owner` was
    given beside its `own`.

    Raises UsageError for an option that there is not, naming the nearest, and for one that would change something.
    """
    for name, value in others.items():
        if name not in elsewhere:
            raise unknown(f"option of {owner.__name__}", name, [*own, *elsewhere])
        if value != elsewhere[name].default:
            raise UsageError(f"{owner.__name__} does nothing with {name}={value!r}: {elsewhere[name].instead}")
    return {name: each.default for name, each in elsewhere.items()}
