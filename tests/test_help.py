"""`help()` of every public class and function: each argument of a constructor has an entry in the docstring."""

from __future__ import annotations

import inspect
import itertools
import pydoc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from tests.sources import require_none
from tests.test_docs import PUBLIC

pytestmark = pytest.mark.lint
OURS = ("pipeflow.", __name__)
ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*):(?: |$)")


def entries(docstring: str) -> set[str]:
    """The names that the docstring describes under `Args:` and `Attributes:`."""
    found, inside = set[str](), False
    for line in inspect.cleandoc(docstring).splitlines():
        if line and not line.startswith(" "):
            inside = line in ("Args:", "Attributes:")
        elif inside and (entry := ENTRY.match(line)):
            found.update(name.lstrip("*") for name in entry[1].split(", "))
    return found


def has_constructor(kind: type) -> bool:
    """Whether pipeflow wrote it: enums and protocols have none, some exceptions take what their Python base takes."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith(OURS)]
    if issubclass(kind, Enum) or getattr(kind, "_is_protocol", False):
        return False
    return any("__init__" in vars(base) or issubclass(base, tuple) for base in ours)


def undescribed(kind: type) -> list[str]:
    """The arguments of a class's constructor without an entry in its docstring or in that of its `__init__`."""
    if not has_constructor(kind):
        return []
    described = entries(kind.__doc__ or "") | entries(kind.__init__.__doc__ or "")  # type: ignore[misc]  # only read
    arguments = inspect.signature(kind).parameters
    return [name for name in arguments if not name.startswith("_") and name not in described]


def public(package: str) -> dict[str, Any]:
    """The public names of a package, and what they stand for."""
    module = import_module(f"pipeflow.{package}".rstrip("."))
    return {name: getattr(module, name) for name in module.__all__}


def unhelpful(name: str, value: Any) -> Iterator[str]:
    """What `help()` of a public name lacks."""
    if inspect.isclass(value):
        yield from (f"{name}: nothing about the argument {missing}" for missing in undescribed(value))
    if not callable(value):
        return
    if not inspect.isclass(value) or has_constructor(value):
        try:
            inspect.signature(value)
        except ValueError:
            yield f"{name}: no signature"
    if not (value.__doc__ or "").strip():
        yield f"{name}: no docstring"


def test_every_public_name_is_described() -> None:
    names = {f"{package}.{name}": value for package in PUBLIC for name, value in public(package).items()}
    require_none(fault for name, value in names.items() for fault in unhelpful(name, value))


def length(value: Any) -> int:
    """The lines with text of its `pydoc`, without what it inherits."""
    lines = pydoc.plain(pydoc.render_doc(value)).splitlines()
    own = itertools.takewhile(lambda line: "inherited from" not in line, lines)
    return sum(bool(line.strip(" |-")) for line in own)


def test_no_pydoc_is_longer_than_people_read() -> None:
    lengths = {name: length(value) for name, value in public("").items()}
    require_none(f"pydoc pipeflow.{name} has {lines} lines" for name, lines in lengths.items() if lines >= 120)


class Described:
    """Is described.

    Args:
        first, second: two at once.
        *others: any number.

    Raises:
        third: is no argument's entry.
    """

    def __init__(self, first: int, second: int, third: int, *others: int, **options: int) -> None:
        """Makes one.

        Args:
            options: are described here:
                fourth: is not, being inside another entry.
        """


class Derived(Described):
    """Has the arguments of its base, and no entries."""


@dataclass
class Fields:
    """A value.

    Attributes:
        first: an argument, too.
    """

    first: int
    second: int = 0


class Pair(NamedTuple):
    """Two values, `first` and `second`."""

    first: int
    second: int


class Colour(Enum):
    """Has no constructor of its own."""

    RED = 1


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (Described, ["third"]),
        (Derived, ["first", "second", "third", "others"]),
        (Fields, ["second"]),
        (Pair, ["first", "second"]),
        (Colour, []),
        (KeyError, []),
    ],
)
def test_an_argument_without_an_entry_is_found(kind: type, missing: list[str]) -> None:
    assert undescribed(kind) == missing


def test_the_guard_sees_what_is_not_described() -> None:
    assert list(unhelpful("Fields", Fields)) == ["Fields: nothing about the argument second"]
    assert list(unhelpful("bare", lambda: None)) == ["bare: no docstring"]
    assert list(unhelpful("pop", dict.pop)) == ["pop: no signature"]
