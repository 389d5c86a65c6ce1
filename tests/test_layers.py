"""Who may import whom, and who may name whom. Imports at the top of a module, inside functions and for types alone all
count; so do names in code, strings, comments and docstrings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeflow
from tests.sources import DOCS, PACKAGE, Fault, Source, documents, line_of, require, sources

pytestmark = pytest.mark.lint
PLANS = {"core", "analysis", "soundness", "orders", "planning", "schedules", "draw"}
ENGINE = {"parallel", "deferral", "tensor", "stages", "runtime", "optim", "checkpoint", "training"}
LAYERS: dict[str, set[str]] = {
    "core": set(),
    "analysis": {"core", "networkx"},
    "soundness": {"core", "analysis"},
    "orders": {"core", "analysis", "ortools"},
    "schedules": {"core", "orders"},
    "planning": {"core", "analysis", "soundness", "orders", "schedules"},
    "draw": {"core", "analysis", "rich"},
    "explore": {"core", "analysis", "soundness", "orders", "schedules", "planning", "draw", "traces"},
    "traces": {"core", "analysis", "soundness", "schedules", "planning"},
    "cli": {"pipeflow", "rich", "shtab", "calibration", "checking", "explore", "parallel", "traces", *PLANS},
    "__main__": {"cli"},
    "torch_private": {"torch"},
    "parallel": {"core", "torch"},
    "deferral": {"core", "torch"},
    "tensor": {"core", "parallel", "deferral", "torch"},
    "stages": {"core", "torch"},
    "pricing": {"core", "planning", "stages", "torch"},
    "runtime": {"core", "analysis", "soundness", "orders", "parallel", "deferral", "stages", "tensor", "torch"},
    "optim": {"core", "parallel", "tensor", "runtime", "torch"},
    "checkpoint": {"core", "parallel", "tensor", "runtime", "optim", "torch", "safetensors", "numpy"},
    "training": {
        "core",
        "analysis",
        "planning",
        "schedules",
        "draw",
        "parallel",
        "tensor",
        "runtime",
        "optim",
        "checkpoint",
        "torch",
        "rich",
        "wandb",
        "mlflow",
    },
    "models": {"core", "parallel", "tensor", "runtime", "torch"},
    "checking": {"core", "pipeflow", "schedules", "parallel", "runtime", "checkpoint", "testing", "torch", "numpy"},
    "calibration": {"core", "planning", "schedules", "parallel", "runtime", "models", "torch", "numpy"},
    "adapters": {
        "core",
        "schedules",
        "parallel",
        "stages",
        "runtime",
        "optim",
        "checkpoint",
        "torch",
        "transformers",
        "numpy",
    },
    "huggingface": {
        "core",
        "adapters",
        "parallel",
        "stages",
        "tensor",
        "runtime",
        "optim",
        "checkpoint",
        "torch",
        "peft",
        "transformers",
        "accelerate itself",
    },
    "accelerate": {
        "core",
        "adapters",
        "parallel",
        "stages",
        "runtime",
        "checkpoint",
        "tensor",
        "torch",
        "accelerate itself",
    },
    "lightning": {
        "core",
        "adapters",
        "parallel",
        "stages",
        "runtime",
        "optim",
        "checkpoint",
        "torch",
        "lightning itself",
    },
    "colossalai": {"core", "adapters", "schedules", "torch", "safetensors", "peft", *ENGINE},
    "megatron": {"core", "adapters", "schedules", "models", "torch", *ENGINE},
    "pipelining": {"core", "adapters", "schedules", "parallel", "deferral", "runtime", "torch"},
    "testing": {"pipeflow", "torch", *PLANS, *ENGINE},
    "__init__": {"pipeflow", "pricing", "huggingface", "traces", *PLANS, *ENGINE},
}
FOLDERS = {
    layer: f"{door}/{layer}"
    for door, layers in {
        "core": ["analysis", "soundness"],
        "schedules": ["orders"],
        "planning": ["pricing"],
        "engine": ["torch_private", "parallel", "deferral", "tensor", "stages", "runtime"],
        "training": ["optim", "checkpoint", "models"],
        "adapters": ["huggingface", "accelerate", "lightning", "pipelining"],
        "tools": ["traces", "explore", "calibration", "cli"],
    }.items()
    for layer in layers
}
"""The layers that lie in another folder. Each other layer is a folder of its own name."""
DOORS = sorted({FOLDERS.get(layer, layer).partition("/")[0] for layer in LAYERS} - {"__init__", "__main__"})
"""The folders that `ls pipeflow` shows."""
FOREIGN = {
    "accelerate itself",
    "lightning itself",
    "mlflow",
    "networkx",
    "numpy",
    "ortools",
    "peft",
    "rich",
    "safetensors",
    "shtab",
    "torch",
    "transformers",
    "wandb",
}
SPLIT_STAGES = {
    "engine/runtime/from_module.py",
    "engine/runtime/pipeline.py",
    "engine/runtime/program/ahead.py",
    "engine/runtime/program/memory_actions.py",
}
"""The files of the engine that know tensor-parallel layers: two make stages, and two replay their random numbers."""


def layer_at(path: str) -> str:
    """The layer to which a path in the package belongs. A layer's own name stands for its folder."""
    return next(
        (layer for layer, folder in FOLDERS.items() if f"{path}/".startswith(f"{folder}/")), path.partition("/")[0]
    )


def layer_of(source: Source) -> str:
    return layer_at(source.name.removesuffix(".pyi").removesuffix(".py").removesuffix("/__init__"))


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """The full name of every module that a file imports, wherever in it, and the line."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module, _, 0):
                yield node.lineno, module or ""
            case ast.ImportFrom():
                yield node.lineno, "a relative import"
            case _:
                pass


def target(name: str) -> str | None:
    """The layer of pipeflow or the foreign package that a module belongs to; None for the standard library. A package
    of which a layer has the name is called "itself". Who may import torch may import its private names.
    """
    first, *rest = name.split(".")
    if first in sys.stdlib_module_names:
        return None
    if first == "pipeflow" and rest:
        return "torch" if "torch_private" in rest else layer_at("/".join(rest))
    return f"{first} itself" if first in LAYERS and first != "pipeflow" else first


def foreign_imports(source: Source) -> Iterator[Fault]:
    """What a file imports from elsewhere than its own layer and those below."""
    layer = layer_of(source)
    if layer not in LAYERS:
        if source.name != f"{layer}/__init__.py" or layer not in DOORS:
            yield 1, f"the new folder {layer} needs its layer"
        return
    for line, name in imported(source):
        if name.removeprefix("pipeflow.").partition(".")[0] in FOLDERS and name.startswith("pipeflow."):
            yield line, f"{name} is a short path, for users"
        if target(name) not in LAYERS[layer] | {layer, None}:
            yield line, f"{layer} may not import {name}"


def test_a_file_imports_from_its_own_layer_and_those_below() -> None:
    require(foreign_imports, [*sources(), *sources("*.pyi")])


def test_the_engine_knows_no_tensor_parallel_layer() -> None:
    engine = [source for source in sources() if layer_of(source) == "runtime"]
    assert {each.name for each in engine if "tensor" in {target(name) for _, name in imported(each)}} == SPLIT_STAGES


def reach(layer: str) -> set[str]:
    """The layer and all below it."""
    private = {"torch_private"} if "torch" in LAYERS[layer] else set[str]()
    return {layer, *private}.union(*(reach(below) for below in LAYERS[layer] & set(LAYERS)))


def named(text: str) -> set[str]:
    """The layers that a text names: as `pipeflow.x` or `pipeflow/x`, as a folder `x/`, or by a module, `x.module` or
    `x/module`. Their plain names are English words, too. Examples (`>>>`) may use anything, as tests may.
    """
    told = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((">>>", "...")))
    outright = {layer_at(path.replace(".", "/")) for path in re.findall(r"\bpipeflow[./](\w+(?:[./]\w+)*)", told)}
    outright |= {layer_at(path) for path in re.findall(r"(?<![\w./])(\w+(?:/\w+)*)/(?!\w)", told)}
    paths = (path.replace(".", "/") for path in re.findall(r"(?<![\w./])\w+(?:[./]\w+)+", told))
    return set(LAYERS) & (outright | {layer_at(path) for path in paths if is_module(path)})


def is_module(path: str) -> bool:
    """Whether a path begins with that of a module in a layer."""
    layer = layer_at(path)
    folder = FOLDERS.get(layer, layer)
    name = path.removeprefix(f"{folder}/").removeprefix(f"{layer}/").partition("/")[0]
    return (PACKAGE / folder / f"{name}.py").exists() or (PACKAGE / folder / name / "__init__.py").exists()


def foreign_names(source: Source) -> Iterator[Fault]:
    """What a file names of elsewhere than its own layer and those below."""
    layer = layer_of(source)
    known = reach(layer) if layer in LAYERS else set(LAYERS)  # a folder of layers names them
    for line, text in enumerate(source.text.splitlines(), 1):
        yield from ((line, f"{layer} may not name {name}") for name in sorted(named(text) - known))


def test_a_file_names_its_own_layer_and_those_below() -> None:
    require(foreign_names, sources())


@pytest.mark.parametrize(
    "text",
    [
        "from pipeflow.training.optim.zero import Zero",
        "# as `optim/zero` does",
        '"""See pipeflow.optim."""',
        'name = "optim.zero"',
        "what optim/ does",
        "pipeflow/training/optim",
    ],
)
def test_the_guard_sees_every_form_of_a_name(text: str) -> None:
    assert named(text) == {"optim"}
    assert list(foreign_names(Source("engine/runtime/step.py", f"\n{text}"))) == [(2, "runtime may not name optim")]


@pytest.mark.parametrize(
    "text",
    [
        "training/evaluation",
        "torch.optim.optimizer",
        "self.optim.zero",
        "the core of it",
        ">>> from pipeflow.optim import Zero",
        "tensor.data",
    ],
)
def test_the_guard_knows_words_from_names(text: str) -> None:
    assert named(text) == set()


def unknown() -> set[str]:
    """What the table allows that is neither a layer, nor the root, nor a package that we stand on."""
    return set().union(*LAYERS.values()) - set(LAYERS) - FOREIGN - {"pipeflow"}


def test_every_layer_exists() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert folders == set(DOORS)
    assert files - {"__init__", "__main__"} <= set(FOLDERS), "a file beside the folders is the short path of a layer"
    assert {FOLDERS.get(layer, layer) for layer in LAYERS} - {"__init__", "__main__"} <= {
        path.relative_to(PACKAGE).as_posix().removesuffix(".py").removesuffix("/__init__")
        for path in PACKAGE.rglob("*.py")
    }
    assert unknown() == set()


def test_the_package_has_at_most_twelve_folders() -> None:
    assert len(DOORS) <= 12


def test_a_layer_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS, "core", {"unknown"})
    assert unknown() == {"unknown"}
    monkeypatch.setitem(LAYERS, "unknown", set())
    with pytest.raises(AssertionError):
        test_every_layer_exists()


def unknown_modules(source: Source) -> Iterator[Fault]:
    """Modules that are named, as `core/cost.py` or as `pipeflow.core.cost`, and do not exist."""
    for found in re.finditer(r"(?<![\w./])(?:pipeflow/)?((\w+)/[\w/]+\.py)\b", source.text):
        if found[2] in {*LAYERS, *DOORS} and not (PACKAGE / found[1]).exists():
            yield line_of(source.text, found.start()), f"there is no {found[1]}"
    there = {*DOORS, *FOLDERS, *dir(pipeflow), "py", "json", "html", "svg", "css"}
    for found in re.finditer(r"(?<![\w./-])pipeflow\.([a-z]\w*)", source.text):
        if found[1] not in there:
            yield line_of(source.text, found.start()), f"there is no {found[0]}"


def test_every_module_that_is_named_exists() -> None:
    """In code and in documents."""
    require(unknown_modules, (*sources(), *documents()))


def test_the_guard_sees_modules_that_do_not_exist() -> None:
    text = "pipeflow/core/cost.py\ncore/never.py\nother/never.py\npipeflow.core\npipeflow.never\npipeflow.json\n"
    assert [line for line, _ in unknown_modules(Source("docs/one.md", text))] == [2, 5]


def test_the_design_has_the_table() -> None:
    """That of this file; `core`, torch and the root are not repeated in each of its lines."""
    table = (DOCS / "design.md").read_text(encoding="utf-8").partition("| folder | may import")[2]
    groups = {"plans": PLANS, "engine": ENGINE}
    shown = {
        layer_at(folder): set[str]().union(*(groups.get(name, {name}) for name in names.split(", ") if name))
        for folder, names in re.findall(r"^\| `([\w/]+?)(?:/|\.py)` \| ([\w, ]*?) ?\|", table, re.MULTILINE)
    }
    unsaid = {"core", "torch", "pipeflow"}
    files = {"__init__", "__main__"}
    assert {package: names - unsaid for package, names in shown.items()} == {
        layer: below - unsaid for layer, below in LAYERS.items() if layer not in files
    }
    assert list(shown) == [layer for layer in LAYERS if layer not in files]


def floors(below: dict[str, set[str]]) -> list[list[str]]:
    """The names in floors: what each needs lies on the floors under it. Raises AssertionError if there is a cycle."""
    found: list[list[str]] = []
    left = dict(below)
    while left:
        ready = sorted(name for name, needed in left.items() if not needed & set(left))
        assert ready, f"a cycle of {sorted(left)}"
        found.append(ready)
        left = {name: needed for name, needed in left.items() if name not in ready}
    return found


def doors() -> dict[str, set[str]]:
    """The folders of the package, and those from which their files import."""
    found = {door: set[str]() for door in DOORS}
    for source in sources():
        door = source.name.partition("/")[0]
        for _, name in imported(source):
            if door in found and name.startswith("pipeflow."):
                found[door] |= {FOLDERS.get(name.split(".")[1], name.split(".")[1]).partition("/")[0]} & {*DOORS} - {
                    door
                }
    return found


def test_layers_have_no_cycle() -> None:
    assert floors({layer: below & set(LAYERS) for layer, below in LAYERS.items()})


def test_the_design_has_the_picture_of_the_folders() -> None:
    """As the imports are now, those inside functions and for types alone too: no folder imports from above itself."""
    width = max(map(len, DOORS))
    below = doors()
    lines = [
        f"{door:{width}}  {' '.join(sorted(below[door]))}".rstrip()
        for floor in reversed(floors(below))
        for door in floor
    ]
    picture = "\n".join(lines)
    assert f"```text\n{picture}\n```" in (DOCS / "design.md").read_text(encoding="utf-8"), picture


def shadowing(package: Path) -> dict[str, int]:
    """The names of a package that hide a module of it, and their lines: after `import a.b`, `a.b` would be something
    else.
    """
    modules = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    own = ".".join(package.relative_to(PACKAGE.parent).parts)
    bound: dict[str, int] = {}
    for node in ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body:
        names: set[str] = set()
        match node:
            case ast.ImportFrom(module, aliases):
                modules -= {alias.name for alias in aliases if module == own}  # the modules themselves
                names = {alias.asname or alias.name for alias in aliases}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names = {name}
            case ast.Assign(targets, value):
                names = {target.id for target in targets if isinstance(target, ast.Name)}
                elements = value.elts if isinstance(value, ast.List) else []  # those of __all__
                names |= {str(each.value) for each in elements if isinstance(each, ast.Constant)}
            case _:
                pass
        bound |= dict.fromkeys(names, node.lineno)
    return {name: line for name, line in bound.items() if name in modules}


def hidden_modules(source: Source) -> Iterator[Fault]:
    """Of the packages: names that hide a module."""
    if source.name.endswith("__init__.py"):
        for name, line in shadowing((PACKAGE / source.name).parent).items():
            yield line, f"{name} hides the module of this name"


def test_no_name_of_a_package_hides_a_module_of_it() -> None:
    require(hidden_modules, sources())


def test_the_guard_sees_what_hides_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    for name in ("made", "listed", "defined", "said", "fine", "own"):
        (tmp_path / f"{name}.py").touch()
    source = "from .made import made\ndef defined(): ...\nsaid: int = 1\nlisted = [1]\n__all__ = ['listed', 'own']\n"
    (tmp_path / "__init__.py").write_text(source + f"from {tmp_path.name} import own\n", encoding="utf-8")
    assert shadowing(tmp_path) == {"made": 1, "defined": 2, "said": 3, "listed": 5}


def test_the_guard_sees_every_form_of_import() -> None:
    text = """
import os.path, torch.nn
from pipeflow.engine.runtime.stage import Stage
from pipeflow import verify
from . import graph
if TYPE_CHECKING:
    from rich.text import Text
def function():
    import numpy
"""
    source = Source("core/module.py", text)
    found = {target(name) for _, name in imported(source)}
    assert found == {None, "torch", "runtime", "pipeflow", "a relative import", "rich", "numpy"}
    assert [line for line, _ in foreign_imports(source)] == [2, 3, 4, 5, 7, 9]
    assert list(foreign_imports(Source("never/module.py", ""))) == [(1, "the new folder never needs its layer")]


BY_TEXT = {  # names of a package, subcommands, those of a table (whose stubs are guarded), and of a script
    *("__init__.py", "draw/__init__.py", "core/face.py", "tools/cli/command.py"),
    "colossalai/__main__.py",
}


def imports_by_a_text(source: Source) -> Iterator[Fault]:
    """What is imported through a text cannot be guarded."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield node.lineno, f"imports by {called}"


def test_modules_are_imported_by_a_text_there_alone() -> None:
    require(imports_by_a_text, (source for source in sources() if source.name not in BY_TEXT))


def test_the_guard_sees_imports_by_a_text() -> None:
    source = Source("core/one.py", "importlib.import_module('a')\n__import__('b')\nimport c\n")
    assert [line for line, _ in imports_by_a_text(source)] == [1, 2]
