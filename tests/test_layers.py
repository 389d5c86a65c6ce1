"""Who may import whom, and who may name whom. Imports at the top of a module, inside functions and for types alone all
count; so do names in code, strings, comments and docstrings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeflow

PACKAGE = Path(pipeflow.__file__).parent

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
    "explore": {"core", "analysis", "soundness", "orders", "schedules", "planning", "draw"},
    "cli": {"pipeflow", "rich", "shtab", "calibration", "explore", *PLANS},
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
    "calibration": {"core", "planning", "schedules", "parallel", "runtime", "models", "torch", "numpy"},
    "huggingface": {
        "core",
        "parallel",
        "stages",
        "runtime",
        "optim",
        "checkpoint",
        "torch",
        "transformers",
        "accelerate",
        "numpy",
    },
    "colossalai": {"core", "schedules", "torch", "safetensors", "peft", "huggingface", *ENGINE},
    "megatron": {"core", "schedules", "models", "torch", *ENGINE},
    "testing": {"pipeflow", "torch", *PLANS, *ENGINE},
    "__init__": {"pipeflow", "pricing", "huggingface", *PLANS, *ENGINE},
}
FOREIGN = {
    "accelerate",
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
SPLIT_STAGES = {"runtime/from_module.py", "runtime/pipeline.py"}
"""The files of the engine that know tensor-parallel layers: they make stages; the engine sees modules."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def stubs() -> list[Path]:
    return sorted(PACKAGE.rglob("*.pyi"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """The full name of every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module, _, 0):
                yield module or ""
            case ast.ImportFrom():
                yield "a relative import"
            case _:
                pass


def target(name: str) -> str | None:
    """The layer of pipeflow or the foreign package that a module belongs to; None for the standard library."""
    first, *rest = name.split(".")
    if first in sys.stdlib_module_names:
        return None
    return rest[0] if first == "pipeflow" and rest else first


def violations(path: Path) -> list[str]:
    layer = layer_of(path)
    allowed = LAYERS[layer] | {layer}
    targets = {target(name) for name in imported(path)} - {None}
    return sorted(str(found) for found in targets if found not in allowed)


@pytest.mark.parametrize("path", [*modules(), *stubs()], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_from_its_own_layer_and_those_below(path: Path) -> None:
    assert layer_of(path) in LAYERS, "a new folder needs its layer"
    assert violations(path) == []


def test_the_engine_knows_no_tensor_parallel_layer() -> None:
    files = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if layer_of(path) == "runtime" and "tensor" in set(map(target, imported(path)))
    }
    assert files == SPLIT_STAGES


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


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_names_its_own_layer_and_those_below(path: Path) -> None:
    assert named(path.read_text()) - reach(layer_of(path)) == set()


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
    assert not named(text) <= reach("runtime")


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


@pytest.mark.parametrize(
    "path", [*modules(), *sorted((PACKAGE.parent / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_every_module_that_is_named_exists(path: Path) -> None:
    """In code and in docs, as `runtime/step.py` or as `pipeflow.runtime.step`."""
    text = path.read_text()
    files = re.findall(r"(?<![\w./])(?:pipeflow/)?((\w+)/[\w/]+\.py)\b", text)
    assert [file for file, layer in files if layer in LAYERS and not (PACKAGE / file).exists()] == []
    tops = set(re.findall(r"(?<![\w./-])pipeflow\.([a-z]\w*)", text)) - {"py", "json", "html", "svg", "css"}
    assert tops - set(LAYERS) - set(dir(pipeflow)) == set()


def test_the_design_has_the_table() -> None:
    """That of this file; `core`, torch and the root are not repeated in each of its lines."""
    design = (PACKAGE.parent / "docs" / "design.md").read_text()
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


def shadowing(package: Path) -> set[str]:
    """The names of a package that hide a module of it: after `import a.b`, `a.b` would be something else."""
    modules = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    own = ".".join(package.relative_to(PACKAGE.parent).parts)
    bound: set[str] = set()
    for node in ast.parse((package / "__init__.py").read_text()).body:
        match node:
            case ast.ImportFrom(module, names):
                modules -= {name.name for name in names if module == own}  # the modules themselves
                bound |= {name.asname or name.name for name in names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                bound.add(name)
            case ast.Assign(targets, ast.List(elements)):
                bound |= {target.id for target in targets if isinstance(target, ast.Name)}
                bound |= {str(each.value) for each in elements if isinstance(each, ast.Constant)}  # those of __all__
            case ast.Assign(targets):
                bound |= {target.id for target in targets if isinstance(target, ast.Name)}
            case _:
                pass
    return bound & modules


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: str(path.parent.name))
def test_no_name_of_a_package_hides_a_module_of_it(path: Path) -> None:
    assert shadowing(path.parent) == set()


def test_the_guard_sees_what_hides_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    for name in ("made", "listed", "defined", "said", "fine", "own"):
        (tmp_path / f"{name}.py").touch()
    source = "from .made import made\ndef defined(): ...\nsaid: int = 1\nlisted = [1]\n__all__ = ['listed', 'own']\n"
    (tmp_path / "__init__.py").write_text(source + f"from {tmp_path.name} import own\n")
    assert shadowing(tmp_path) == {"made", "defined", "said", "listed"}


def test_the_guard_sees_every_form_of_import(tmp_path: Path) -> None:
    source = """
import os.path, torch.nn
from pipeflow.runtime.stage import Stage
from pipeflow import verify
from . import graph
if TYPE_CHECKING:
    from rich.text import Text
def function():
    import numpy
"""
    (tmp_path / "module.py").write_text(source)
    found = {target(name) for name in imported(tmp_path / "module.py")}
    assert found == {None, "torch", "runtime", "pipeflow", "a relative import", "rich", "numpy"}


BY_TEXT = {  # names of a package, subcommands, those of a table (whose stubs are guarded), of a script, and of policies
    *("__init__.py", "draw/__init__.py", "core/face.py", "cli/command.py"),
    *("colossalai/__main__.py", "colossalai/policies.py"),
}


def test_modules_are_imported_by_a_text_there_alone() -> None:
    """What is imported through a text cannot be guarded."""
    for path in modules():
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        }
        if str(path.relative_to(PACKAGE)) not in BY_TEXT:
            assert not called & {"import_module", "__import__"}, path


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not there")

sys.meta_path.insert(0, Refuse())

from pipeflow.cli import main

assert main(["list"]) == 0
heavy = {"networkx", "rich", "json", "pipeflow.analysis", "pipeflow.planning", "pipeflow.soundness"} & set(sys.modules)
assert not heavy, heavy
for command in ("draw", "simulate", "compare", "verify", "export"):
    assert main([command, "interleaved-1f1b", *(["--csv", "-"] if command == "export" else [])]) == 0
assert main(["diff", "interleaved-1f1b", "zb-v"]) == 0
assert main(["plan", "tiny"]) == 0

import pipeflow
for name in pipeflow.__all__:
    try:
        getattr(pipeflow, name)
    except ImportError as error:
        assert "torch is not there" in str(error)
        print("needs torch:", name)
"""


@pytest.mark.slow
def test_plans_and_the_command_need_no_torch() -> None:
    """And the command starts without what only some of its parts need."""
    argv = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    need_torch = {line.split()[-1] for line in result.stdout.splitlines() if line.startswith("needs torch:")}
    assert {"Pipeline", "execute_pipeline", "launch"} <= need_torch
    assert not need_torch & {"make_schedule", "Schedule", "Timeline", "simulate", "verify", "lower", "SCHEDULES"}
