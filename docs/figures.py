"""Writes the figures of migration.md, graphs of GPT-2's embedding and layer, whole and split: `make gallery`."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

ACROSS, DOWN, MARGIN = 190, 66, 34
COLOURS = {"operator": "#dbe7f6", "weight": "#fbe3b6", "tensor": "none", "collective": "#f3c6c6"}


class Node(NamedTuple):
    """An operator, a weight, a tensor or a collective, at a column and a row."""

    kind: str
    text: str
    column: float
    row: float


class Edge(NamedTuple):
    """An arrow between two nodes, with the shape of what passes; `side` bends it around the nodes between."""

    source: str
    target: str
    shape: str = ""
    side: float = 0.0


Graph = tuple[dict[str, Node], list[Edge]]


def embedding(*, split: bool) -> Graph:
    """Rows of two tables, added."""
    wide = "H/t" if split else "H"
    nodes = {
        "ids": Node("tensor", "token numbers", 0.5, 0),
        "places": Node("tensor", "positions", 2.5, 0),
        "wte": Node("weight", f"wte (V, {wide})", 0, 1),
        "wpe": Node("weight", f"wpe (P, {wide})", 3, 1),
        "words": Node("operator", "rows", 1, 1),
        "positions": Node("operator", "rows", 2, 1),
        "sum": Node("operator", "+", 1.5, 3 if split else 2),
        "out": Node("tensor", "hidden states", 1.5, 4 if split else 3),
    }
    edges = [Edge("ids", "words", "(B, S)"), Edge("places", "positions", "(S)")]
    edges += [Edge("wte", "words"), Edge("wpe", "positions"), Edge("sum", "out", "(B, S, H)")]
    for name, column in (("words", 1), ("positions", 2)):
        shape = f"(B, S, {wide})" if name == "words" else f"(S, {wide})"
        if split:
            nodes[f"gather {name}"] = Node("collective", "all-gather", column, 2)
            edges += [Edge(name, f"gather {name}", shape), Edge(f"gather {name}", "sum", shape.replace("H/t", "H"))]
        else:
            edges.append(Edge(name, "sum", shape))
    return nodes, edges


def layer(*, split: bool) -> Graph:
    """Attention, then an MLP of two linear layers, each added to its input."""
    part = "/t" if split else ""
    steps: list[tuple[str, str, str, str, str]] = [  # name, kind, text, its weight, the shape that leaves it
        ("x", "tensor", "hidden states", "", "(B, S, H)"),
        ("norm", "operator", "layer norm", "", "(B, S, H)"),
        ("qkv", "operator", "linear", f"c_attn (H, 3H{part})", f"(B, S, 3H{part})"),
        ("gather qkv", "collective", "all-gather", "", "(B, S, 3H)"),
        ("attention", "operator", "attention", "", "(B, S, H)"),
        ("out", "operator", "linear", f"c_proj (H, H{part})", f"(B, S, H{part})"),
        ("gather out", "collective", "all-gather", "", "(B, S, H)"),
        ("add", "operator", "+", "", "(B, S, H)"),
        ("norm 2", "operator", "layer norm", "", "(B, S, H)"),
        ("wide", "operator", "linear", f"c_fc (H, 4H{part})", f"(B, S, 4H{part})"),
        ("gelu", "operator", "gelu", "", f"(B, S, 4H{part})"),
        ("narrow", "operator", "linear", f"c_proj (4H{part}, H)", "(B, S, H), partial" if split else "(B, S, H)"),
        ("sum", "collective", "all-reduce", "", "(B, S, H)"),
        ("add 2", "operator", "+", "", "(B, S, H)"),
        ("y", "tensor", "hidden states", "", ""),
    ]
    steps = [step for step in steps if split or step[1] != "collective"]
    nodes, edges = {}, []
    for row, (name, kind, text, weight, shape) in enumerate(steps):
        nodes[name] = Node(kind, text, 1, row)
        if weight:
            nodes[f"{name}'s"] = Node("weight", weight, 0, row)
            edges.append(Edge(f"{name}'s", name))
        if row + 1 < len(steps):
            edges.append(Edge(name, steps[row + 1][0], shape))
    return nodes, [*edges, Edge("x", "add", "", 0.9), Edge("add", "add 2", "", 0.9)]


FIGURES = {
    "gpt2-embedding": embedding(split=False),
    "gpt2-embedding-split": embedding(split=True),
    "gpt2-layer": layer(split=False),
    "gpt2-layer-split": layer(split=True),
}


def svg(graph: Graph) -> str:
    """The graph as SVG."""
    nodes, edges = graph
    width = round(max(node.column for node in nodes.values()) * ACROSS + 2 * MARGIN + 190)
    height = round(max(node.row for node in nodes.values()) * DOWN + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" text-anchor="middle">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(_arrow(nodes[edge.source], nodes[edge.target], edge) for edge in edges),
        *map(_shape, nodes.values()),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _place(node: Node) -> tuple[float, float]:
    return MARGIN + 70 + node.column * ACROSS, MARGIN + node.row * DOWN


def _shape(node: Node) -> str:
    x, y = _place(node)
    style = f'fill="{COLOURS[node.kind]}" stroke="#555"'
    outline = {
        "operator": f'<ellipse cx="{x:g}" cy="{y:g}" rx="52" ry="17" {style}/>',
        "collective": f'<rect x="{x - 52:g}" y="{y - 16:g}" width="104" height="32" rx="16" {style}/>',
        "weight": f'<rect x="{x - 68:g}" y="{y - 16:g}" width="136" height="32" {style}/>',
        "tensor": "",
    }[node.kind]
    return f'{outline}<text x="{x:g}" y="{y + 4.5:g}">{escape(node.text)}</text>'


def _arrow(source: Node, target: Node, edge: Edge) -> str:
    (x, y), (to_x, to_y) = _place(source), _place(target)
    said = ""
    if edge.side:
        out, start = x + edge.side * ACROSS / 2 + 40, 54 if source.kind != "tensor" else 48
        path = f"M{x + start:g} {y:g}C{out + 40:g} {y:g} {out + 40:g} {to_y:g} {to_x + 54:g} {to_y:g}"
    elif y == to_y:
        toward = 1 if to_x > x else -1
        path = f"M{x + 68 * toward:g} {y:g}L{to_x - 54 * toward:g} {y:g}"
    else:
        path = f"M{x:g} {y + 18:g}L{to_x:g} {to_y - 19:g}"
        lean, anchor = (-16, "end") if to_x > x else (16 if to_x < x else 10, "start")  # outside of arrows that meet
        where = f'x="{(x + to_x) / 2 + lean:g}" y="{(y + to_y) / 2 + (4 if to_x == x else 9):g}" text-anchor="{anchor}"'
        said = f'<text {where} fill="#333" font-size="12">{edge.shape}</text>'
    return f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#head)"/>{said}'


def write(folder: Path) -> None:
    """Writes all figures."""
    for name, graph in FIGURES.items():
        (folder / f"{name}.svg").write_text(svg(graph), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures")
