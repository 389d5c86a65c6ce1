"""The documentation as a site, by Sphinx: `make docs`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from docutils import nodes  # type: ignore[import-untyped]  # it has no types
from sphinx import addnodes

import pipeflow

project = "pipeflow"
copyright = "the pipeflow authors"  # Sphinx reads this name
release = pipeflow.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "pipeflow"
html_static_path = ["static"]
html_css_files = ["site.css"]
default_role = "code"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["misc.highlighting_failure"]  # a timeline in a block is no program
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True

JOINER = "\N{WORD JOINER}"
EXPLORER = runpy.run_path(str(Path(__file__).parent / "explorer.py"))
README = Path(__file__).parent.parent / "README.md"


def front_page(readme: str) -> str:
    """The README as a page among those of `docs`: links to these lead there, of others the text is left.

    >>> front_page("[a](docs/a.md), [`b`](examples/b.py) and [c](https://example.org)")
    '[a](a.md), `b` and [c](https://example.org)'
    """
    readme = re.sub(r"\]\(docs/", "](./", readme)
    readme = re.sub(r"(?<!!)\[([^\[\]]+)\]\((?!https?:|#|\./)[^)]*\)", r"\1", readme)
    return readme.replace("](./", "](")


def _read(app: Any, name: str, source: list[str]) -> None:
    if name == "index":
        source[0] = front_page(README.read_text(encoding="utf-8")) + "\n" + source[0]


def _keep_names_together(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Where several arguments or attributes are described at once, Sphinx would take the first ones for a type."""
    for index, line in enumerate(lines):
        if names := re.match(r"    ((?:\w+, )+\w+): ", line):
            lines[index] = line.replace(names[1], names[1].replace(", ", f",{JOINER}"), 1)


def _part_names(app: Any, document: Any) -> None:
    """Puts the space back between names that were kept together."""
    for text in list(document.findall(nodes.Text)):
        if JOINER in text:
            text.parent.replace(text, nodes.Text(text.replace(JOINER, " ")))


def _let_names_break(app: Any, document: Any) -> None:
    """Long names of modules may break after a dot in a table; otherwise its columns would not fit on the page."""
    for entry in document.findall(nodes.entry):
        for literal in list(entry.findall(nodes.literal)):
            name = literal.astext()
            if max(map(len, name.split()), default=0) > 30:
                first, *rest = re.split(r"(?<=\.)(?=\w)", name)
                literal.children = [nodes.Text(first)]
                for part in rest:
                    literal += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]


def _link_to_explorer(app: Any, document: Any) -> None:
    """The command `pipeflow explore` leads to the explorer's page among the documents, in the state that it shows; the
    first picture of the front page does, too.
    """
    found = {each: each.astext() for each in document.findall(nodes.literal) if _may_link(each)}
    if app.env.docname == "index":
        found[next(document.findall(nodes.image))] = "pipeflow explore 1f1b zb-v"
    up = "../" * app.env.docname.count("/")
    for node, command in found.items():
        link = nodes.reference("", "", refuri=up + EXPLORER["link"](command))
        node.replace_self(link)
        link += node


def _may_link(literal: nodes.literal) -> bool:
    is_link = isinstance(literal.parent, addnodes.pending_xref | nodes.reference | nodes.title)
    return literal.astext().startswith("pipeflow explore") and not is_link


def _write_explorer(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        EXPLORER["write"](Path(app.outdir))


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("doctree-read", _link_to_explorer)
    app.connect("build-finished", _write_explorer)
    app.connect("doctree-read", _let_names_break)
    app.connect("doctree-read", _part_names)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _keep_names_together, priority=400)  # before napoleon reads them
