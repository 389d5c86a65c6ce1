"""Faults to plant in the package: one small change of its code each, as mutation testing makes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Fault:
    """In a file of the package, the text from `start` to `end`, which are places in its bytes, becomes `text`."""

    file: str
    line: int
    start: int
    end: int
    text: str

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def told(self, source: bytes) -> str:
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.file}:{self.line}: {before} -> {' '.join(self.text.split())}"


def _changed(node: ast.AST) -> ast.AST | None:
    """The node with a fault; None for one of another kind. It is a copy only as deep as it is changed."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARED:
            return ast.Compare(left, [COMPARED[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in COMPUTED and not _is_text(left) and not _is_text(right):
            return ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.IfExp(test, body, otherwise):
            return ast.IfExp(test, otherwise, body)
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() as value):
            return ast.Constant(value + 1)
        case ast.Call(function, [first, second, *rest], keywords):
            return ast.Call(function, [second, first, *rest], keywords)
        case ast.Return(ast.expr()):
            return ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign():
            return ast.Pass()
        case _:
            return None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside functions, without what raises errors, annotations and defaults."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.arguments | ast.AnnAssign | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child
        yield from _code(child)


def faults_of(path: Path, root: Path) -> Iterator[Fault]:
    """All that can be planted in a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in (statement, *_code(statement)):
                if isinstance(node, ast.stmt | ast.expr) and (changed := _changed(node)) is not None:
                    start = starts[node.lineno - 1] + node.col_offset
                    end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
                    text = ast.unparse(ast.fix_missing_locations(changed))
                    yield Fault(
                        path.relative_to(root).as_posix(),
                        node.lineno,
                        start,
                        end,
                        f"({text})" if isinstance(node, ast.expr) else text,
                    )


def sample(root: Path, count: int, seed: int) -> list[Fault]:
    """So many of all faults that the package can have, at random: longer files have more of them."""
    every = {fault for path in sorted((root / "pipeflow").rglob("*.py")) for fault in faults_of(path, root)}
    return Random(seed).sample(sorted(every, key=lambda each: (each.file, each.start, each.text)), count)
