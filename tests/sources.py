"""The files of the package, each read and parsed once, and a failure that lists every offender of a rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

import pipeflow

PACKAGE = Path(pipeflow.__file__).parent
DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Source:
    name: str
    text: str

    @classmethod
    def read(cls, path: Path, root: Path = PACKAGE) -> Source:
        return cls(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


Fault = tuple[int, str]
"""A line, and what is wrong there."""
Rule = Callable[[Source], Iterator[Fault]]


@cache
def sources(files: str = "*.py") -> tuple[Source, ...]:
    return tuple(map(Source.read, sorted(PACKAGE.rglob(files))))


@cache
def documents() -> tuple[Source, ...]:
    root = DOCS.parent
    paths = [root / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "design").glob("*.md"))]
    return tuple(Source.read(path, root) for path in paths)


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def require(rule: Rule, files: Iterable[Source]) -> None:
    """Fails with the file and the line of whatever breaks the rule."""
    require_none(f"{file.name}:{line}: {what}" for file in files for line, what in rule(file))


def require_none(offenders: Iterable[str]) -> None:
    """Fails with all of them."""
    if found := list(offenders):
        pytest.fail("\n".join(found), pytrace=False)


BLOCK = re.compile(r"^([ ]*```)(\{\w+\})?(.*?)^\1|<!--.*?-->", re.DOTALL | re.MULTILINE)
NO_PROSE = re.compile(r"^(?:\||#|!\[|\[[^]]*\]: |:\w+:).*", re.MULTILINE)
PARAGRAPH = re.compile(r"\S(?:.|\n(?!\s*(?:\n|[-*] |\d+\. )))*")


def prose(document: Source) -> Iterator[tuple[int, str]]:
    """The paragraphs and list items of a Markdown document in plain words, each with its first line.

    Leaves out tables, headings and blocks other than notes. A link is its text, and code, or a list of it, is one word.
    """
    lines = BLOCK.sub(
        lambda block: block[3] if block[2] not in (None, "{toctree}") else "\n" * block[0].count("\n"), document.text
    )
    text = NO_PROSE.sub("", lines)
    for found in PARAGRAPH.finditer(text):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`(?:,\s+`[^`]*`)*", "code", found[0]))
        yield line_of(text, found.start()), " ".join(re.sub(r"^(?:[-*]|\d+\.) |\*\*", "", plain).split())
