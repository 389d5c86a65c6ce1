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
    "cli": {"pipeflow", "rich", "shtab", "calibration", "checking", "explore", "traces", *PLANS},
    "__main__": {"cli"},
    "parallel": {"core", "torch"},
    "deferral": {"core", "torch"},
    "tensor": {"core", "parallel", "deferral", "torch"},
    "stages": {"core", "torch"},
    "pricing": {"core", "planning", "stages", "torch"},
    "runtime": {"core", "analysis", "soundness", "parallel", "deferral", "stages", "tensor", "torch"},
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
    "checking": {"core", "pipeflow", "schedules", "parallel", "runtime", "checkpoint", "torch", "numpy"},
    "calibration": {"core", "planning", "schedules", "parallel", "runtime", "models", "torch", "numpy"},
    "huggingface": {
        "core",
        "parallel",
        "stages",
        "runtime",
        "optim",
        "checkpoint",
        "torch",
        "peft",
        "transformers",
        "accelerate itself",
        "numpy",
    },
    "accelerate": {
        "core",
        "schedules",
        "parallel",
        "stages",
        "runtime",
        "optim",
        "checkpoint",
        "tensor",
        "torch",
        "accelerate itself",
    },
    "lightning": {
        "core",
        "schedules",
        "parallel",
        "stages",
        "runtime",
        "optim",
        "checkpoint",
        "torch",
        "accelerate",
        "lightning itself",
    },
    "colossalai": {"core", "schedules", "torch", "safetensors", "peft", "huggingface", *ENGINE},
    "megatron": {"core", "schedules", "models", "torch", *ENGINE},
    "pipelining": {"core", "schedules", "parallel", "deferral", "runtime", "torch"},
    "testing": {"pipeflow", "torch", *PLANS, *ENGINE},
    "__init__": {"pipeflow", "pricing", "huggingface", "traces", *PLANS, *ENGINE},
}
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
    "runtime/from_module.py",
    "runtime/pipeline.py",
    "runtime/program/memory_actions.py",
    "runtime/repeatable.py",
}
"""The files of the engine that know tensor-parallel layers: two make stages, and two replay their random numbers."""


def layer_of(source: Source) -> str:
    return source.name.removesuffix(".py").partition("/")[0]


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
    of which a layer has the name is called "itself".
    """
    first, *rest = name.split(".")
    if first in sys.stdlib_module_names:
        return None
    if first == "pipeflow" and rest:
        return rest[0]
    return f"{first} itself" if first in LAYERS and first != "pipeflow" else first


def foreign_imports(source: Source) -> Iterator[Fault]:
    """What a file imports from elsewhere than its own layer and those below."""
    layer = layer_of(source)
    if layer not in LAYERS:
        yield 1, f"the new folder {layer} needs its layer"
        return
    for line, name in imported(source):
        if target(name) not in LAYERS[layer] | {layer, None}:
            yield line, f"{layer} may not import {name}"


def test_a_file_imports_from_its_own_layer_and_those_below() -> None:
    require(foreign_imports, [*sources(), *sources("*.pyi")])


def test_the_engine_knows_no_tensor_parallel_layer() -> None:
    engine = [source for source in sources() if layer_of(source) == "runtime"]
    assert {each.name for each in engine if "tensor" in {target(name) for _, name in imported(each)}} == SPLIT_STAGES


def reach(layer: str) -> set[str]:
    """The layer and all below it."""
    return {layer}.union(*(reach(below) for below in LAYERS[layer] & set(LAYERS)))


def named(text: str) -> set[str]:
    """The layers that a text names: as `pipeflow.x` or `pipeflow/x`, as a folder `x/`, or by a module, `x.module` or
    `x/module`. Their plain names are English words, too. Examples (`>>>`) may use anything, as tests may.
    """
    told = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((">>>", "...")))
    outright = set(re.findall(r"\bpipeflow[./](\w+)", told)) & set(LAYERS)
    outright |= set(re.findall(r"(?<![\w./])(\w+)/(?!\w)", told)) & set(LAYERS)
    by_module = re.findall(r"(?<![\w./])(\w+)[./](\w+)", told)
    return outright | {layer for layer, module in by_module if layer in LAYERS and is_module(layer, module)}


def is_module(layer: str, name: str) -> bool:
    return (PACKAGE / layer / f"{name}.py").exists() or (PACKAGE / layer / name / "__init__.py").exists()


def foreign_names(source: Source) -> Iterator[Fault]:
    """What a file names of elsewhere than its own layer and those below."""
    layer = layer_of(source)
    known = reach(layer)
    for line, text in enumerate(source.text.splitlines(), 1):
        yield from ((line, f"{layer} may not name {name}") for name in sorted(named(text) - known))


def test_a_file_names_its_own_layer_and_those_below() -> None:
    require(foreign_names, sources())


@pytest.mark.parametrize(
    "text",
    [
        "from pipeflow.optim.zero import Zero",
        "# as `optim/zero` does",
        '"""See pipeflow.optim."""',
        'name = "optim.zero"',
        "what optim/ does",
        "pipeflow/optim",
    ],
)
def test_the_guard_sees_every_form_of_a_name(text: str) -> None:
    assert named(text) == {"optim"}
    assert list(foreign_names(Source("runtime/step.py", f"\n{text}"))) == [(2, "runtime may not name optim")]


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
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(LAYERS) == there
    assert unknown() == set()


def test_a_layer_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS, "core", {"unknown"})
    assert unknown() == {"unknown"}
    monkeypatch.setitem(LAYERS, "unknown", set())
    with pytest.raises(AssertionError):
        test_every_layer_exists()


def unknown_modules(source: Source) -> Iterator[Fault]:
    """Modules that are named, as `runtime/step.py` or as `pipeflow.runtime.step`, and do not exist."""
    for found in re.finditer(r"(?<![\w./])(?:pipeflow/)?((\w+)/[\w/]+\.py)\b", source.text):
        if found[2] in LAYERS and not (PACKAGE / found[1]).exists():
            yield line_of(source.text, found.start()), f"there is no {found[1]}"
    there = {*LAYERS, *dir(pipeflow), "py", "json", "html", "svg", "css"}
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
    design = (DOCS / "design.md").read_text()
    groups = {"plans": PLANS, "engine": ENGINE}
    shown = {
        package: set[str]().union(*(groups.get(name, {name}) for name in names.split(", ") if name))
        for package, names in re.findall(r"^\| `(\w+)/` \| ([\w, ]*?) ?\|", design, re.MULTILINE)
    }
    unsaid = {"core", "torch", "pipeflow"}
    files = {"__init__", "__main__"}
    assert {package: names - unsaid for package, names in shown.items()} == {
        layer: below - unsaid for layer, below in LAYERS.items() if layer not in files
    }
    assert list(shown) == [layer for layer in LAYERS if layer not in files]


def test_layers_have_no_cycle() -> None:
    order: list[str] = []
    while len(order) < len(LAYERS):
        ready = [layer for layer in LAYERS if layer not in order and not (LAYERS[layer] & set(LAYERS)) - set(order)]
        assert ready, set(LAYERS) - set(order)
        order += ready


def shadowing(package: Path) -> dict[str, int]:
    """The names of a package that hide a module of it, and their lines: after `import a.b`, `a.b` would be something
    else.
    """
    modules = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    own = ".".join(package.relative_to(PACKAGE.parent).parts)
    bound: dict[str, int] = {}
    for node in ast.parse((package / "__init__.py").read_text()).body:
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
    (tmp_path / "__init__.py").write_text(source + f"from {tmp_path.name} import own\n")
    assert shadowing(tmp_path) == {"made": 1, "defined": 2, "said": 3, "listed": 5}


def test_the_guard_sees_every_form_of_import() -> None:
    text = """
import os.path, torch.nn
from pipeflow.runtime.stage import Stage
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


BY_TEXT = {  # names of a package, subcommands, those of a table (whose stubs are guarded), of a script, and of policies
    *("__init__.py", "draw/__init__.py", "core/face.py", "cli/command.py"),
    *("colossalai/__main__.py", "colossalai/policies.py"),
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
