"""Stubs of the faces' modules, which type checkers and editors read, since they cannot import: `make stubs` writes them
from the tables.
"""

from __future__ import annotations

from pathlib import Path

import pipeflow
from pipeflow.colossalai.table import FACE as COLOSSALAI
from pipeflow.core.face import Face
from pipeflow.megatron.table import FACE as MEGATRON

ROOT = Path(pipeflow.__file__).parents[1]
FACES = (COLOSSALAI, MEGATRON)
HEADER = "# Written by `make stubs` from the table of the package.\n"


def stubs(face: Face) -> dict[Path, str]:
    """The texts of a face's stubs, by their files. A package that only has modules needs none."""
    return {file_of(face, path): stub(face, path) for path in face.modules() if face.names(path)}


def file_of(face: Face, path: str) -> Path:
    file = ROOT.joinpath(*face.full(path).split("."))
    return file / "__init__.pyi" if face.submodules(path) else file.with_suffix(".pyi")


def stub(face: Face, path: str) -> str:
    """The text of a stub: an import from each module that defines names, and the list of all names."""
    imports: dict[str, list[str]] = {}
    for source, name, alias in face.names(path):
        is_plain = name == alias and not alias.startswith("_")
        imports.setdefault(source, []).append(name if is_plain else f"{name} as {alias}")
    lines = [f"from {source} import {', '.join(names)}\n" for source, names in imports.items()]
    public = ", ".join(f'"{name}"' for name in face.public(path))
    return "".join([HEADER, *lines, f"\n__all__ = [{public}]\n"])


def main() -> None:
    for face in FACES:
        for old in ROOT.joinpath(*face.package.split(".")).rglob("*.pyi"):
            old.unlink()
        for file, text in stubs(face).items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
