"""Names: what the field `schedule` of a link lists: names of schedules, which may have options of their own, the
schedule that the reader builds, and files that the reader opened. Must not contain: what an option means.

>>> split("interleaved-1f1b:chunks=4")
('interleaved-1f1b', {'chunks': '4'})
>>> split("interleaved-1f1b:")
('interleaved-1f1b', {})
>>> split("interleaved-1f1b")
('interleaved-1f1b', None)
>>> file_of("file:run.json")
'run.json'
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FILE = "file"


def split(text: str) -> tuple[str, dict[str, str] | None]:
    """A name without its own options, and these as texts. None: it has none of its own, and takes those of the link.
    Names have commas between, so values have underscores instead.
    """
    name, colon, rest = text.partition(":")
    options = (each.partition("=") for each in rest.split(":") if each)
    return name, {option: value.replace("_", ",") for option, _, value in options} if colon else None


def joined(name: str, options: Mapping[str, str]) -> str:
    """The name with its own options, which `split` reads."""
    return f"{name}:" + ":".join(f"{option}={value.replace(',', '_')}" for option, value in options.items())


def file_of(text: str) -> str | None:
    """The name of the file; None for anything else."""
    kind, _, name = text.partition(":")
    return name if kind == FILE and is_file(name) else None


def is_file(name: str) -> bool:
    """Whether a file may have this name."""
    return re.fullmatch(r"[\w.-]{1,60}", name, re.ASCII) is not None


def title(text: str) -> str:
    """A name for people: its own options stand after it."""
    name, _, options = text.partition(":")
    return options if name == FILE else " ".join([name, *filter(None, options.split(":"))])
