"""The faces, `pipeflow.colossalai` and `pipeflow.megatron`: modules that are in a table alone. Scripts, type checkers
and pickles find all of their names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pydoc
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pipeflow.colossalai.booster.plugin
import pipeflow.megatron.core
from pipeflow.colossalai.boosters import Booster
from pipeflow.core.face import _SHORT_PATHS, Face
from tests.stubs import FACES, ROOT, file_of, stubs

HERE = Path(__file__).parent
OF_TRANSFORMERS = "shardformer.modeling.chatglm2_6b."
"""Modules that need the package transformers."""


def folder(face: Face) -> Path:
    return ROOT.joinpath(*face.package.split("."))


def module(face: Face, path: str) -> ModuleType:
    return importlib.import_module(face.full(path))


def earlier(face: Face) -> Iterator[tuple[str, list[str]]]:
    """The paths and names of a version that had all that the other library's documents show."""
    for line in (HERE / face.package.rpartition(".")[2] / "names.txt").read_text(encoding="utf-8").splitlines():
        path, *names = line.split()
        yield path.strip("."), names


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.package)
def test_every_earlier_name_is_there_or_says_what_to_use_instead(face: Face) -> None:
    said: dict[str, str] = {}
    for path, names in earlier(face):
        for name in names:
            try:
                exec(f"from {face.full(path)} import {name}")
            except ModuleNotFoundError as error:
                said[f"{path}.{name}"] = str(error)
    assert [name for name, text in said.items() if "; use " not in text] == []
    told = {f"use {instead}" for instead in face.instead.values()}
    assert {text.partition("; ")[2] for text in said.values()} == told  # so no row is in vain


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.package)
def test_each_name_is_what_the_table_says(face: Face) -> None:
    """Also in the stubs, which are those of the table."""
    for path in face.modules():
        made = module(face, path)
        for source, name, alias in face.names(path):
            assert vars(made)[alias] is getattr(importlib.import_module(source), name), (path, alias)
        told: dict[str, Any] = {"__all__": []}
        if face.names(path):
            exec(file_of(face, path).read_text(encoding="utf-8"), told)
        listed = told.pop("__all__")
        assert listed == made.__all__ == sorted(set(listed))
        assert all(value is getattr(made, name) for name, value in told.items() if not name.startswith("__"))


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.package)
def test_stubs_are_those_of_the_table(face: Face) -> None:
    there = {path: path.read_text(encoding="utf-8") for path in folder(face).rglob("*.pyi")}
    assert there == stubs(face), "run make stubs"


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.package)
def test_no_module_of_the_table_hides_a_file(face: Face) -> None:
    files = {path.stem for path in folder(face).glob("*.py")}
    names = {each.alias for each in face.names("")}
    assert not (files & {path.partition(".")[0] for path in face.modules()})
    assert not (names & (files | set(face.modules())))
    assert list(folder(face).glob("*/*.py")) == []


def imports(path: Path) -> set[str]:
    """The modules that a file imports anything from, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.package)
def test_files_import_no_module_of_the_table_and_make_no_circle(face: Face) -> None:
    files = {face.full(path.stem): path for path in folder(face).glob("*.py")}
    graph = {name: imports(path) & set(files) for name, path in files.items()}
    assert list(TopologicalSorter(graph).static_order())
    of_table = {face.full(path) for path in face.modules()} - {face.package}
    assert {name: found for name, path in files.items() if (found := imports(path) & of_table)} == {}


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.package)
def test_a_face_is_thin(face: Face) -> None:
    """A file is one adapter, or some that belong together. Longer code belongs to the packages below."""
    for path in folder(face).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                documented = len((ast.get_docstring(node) or "").splitlines())
                assert (node.end_lineno or 0) - node.lineno + 1 - documented <= 50, (path, node.name)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import pipeflow.colossalai.boster", "pipeflow.colossalai has no 'boster'; did you mean 'booster'?"),
        ("import pipeflow.colossalai.nn.metrics", "pipeflow.colossalai.nn has no 'metrics'; did you mean 'metric'?"),
        ("from pipeflow.colossalai import lunch", "pipeflow.colossalai has no 'lunch'; did you mean 'launch'?"),
        ("from pipeflow.colossalai.cluster import X", "has no 'X'; known: DistCoordinator, dist_coordinator"),
        ("import pipeflow.colossalai.lazy.lazy_init", "has no 'lazy'; use from_config or from_pretrained of"),
        ("from pipeflow.colossalai.registry import HOOKS", "has no 'HOOKS'; use pipeflow.training.Registry"),
        ("from pipeflow.colossalai.nn.lr_scheduler import StepLR", "; use torch.optim.lr_scheduler.StepLR"),
        ("from pipeflow.megatron.core import mpv", "pipeflow.megatron.core has no 'mpv'; did you mean 'mpu'?"),
        ("import pipeflow.megatron.cores.models", "pipeflow.megatron has no 'cores'; did you mean 'core'?"),
        ("from pipeflow.megatron.core.enums import ModelType", "has no 'enums'; use a GPTModel without"),
    ],
)
def test_what_does_not_exist_is_one_error_with_the_nearest_name(statement: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(statement)
    assert said in str(caught.value)


def test_an_unknown_attribute() -> None:
    assert not hasattr(pipeflow.colossalai.booster, "Boster")
    assert not hasattr(pipeflow.colossalai.booster, "__wrapped__")
    with pytest.raises(AttributeError, match=r"pipeflow\.megatron\.core has no 'x'; known: datasets, dist_"):
        _ = pipeflow.megatron.core.x  # type: ignore[attr-defined]  # on purpose
    assert find_spec("pipeflow.megatron.__main__") is None


def test_modules_are_like_those_of_files() -> None:
    plugin = importlib.import_module("pipeflow.colossalai.booster.plugin")
    assert plugin is sys.modules[plugin.__name__] is pipeflow.colossalai.booster.plugin
    assert inspect.getsourcefile(plugin) == inspect.getsourcefile(pipeflow.colossalai.table)
    assert "class TorchDDPPlugin(HybridParallelPlugin)" in pydoc.plain(pydoc.render_doc(plugin))
    assert importlib.reload(plugin) is plugin
    names: dict[str, Any] = {}
    exec("from pipeflow.colossalai.booster.plugin import *", names)
    assert set(names) - {"__builtins__"} == set(plugin.__all__)


def test_classes_are_pickled_by_the_file_that_defines_them_and_found_by_every_earlier_path() -> None:
    assert pickle.loads(pickle.dumps(Booster)) is Booster
    assert inspect.getmodule(Booster) is pipeflow.colossalai.boosters
    for path in ("booster", "booster.booster"):
        assert pickle.loads(f"cpipeflow.colossalai.{path}\nBooster\n.".encode()) is Booster


LAZILY = """
import sys
import pipeflow.colossalai, pipeflow.megatron

def loaded():
    return {name for name in sys.modules if name.startswith(("pipeflow.colossalai.", "pipeflow.megatron."))}

assert not {"transformers", "peft", "safetensors"} & set(sys.modules)
assert loaded() == {"pipeflow.megatron.table", *("pipeflow.colossalai." + name for name in OURS)}, loaded()
pipeflow.colossalai.nn.metric.Accuracy
assert "pipeflow.colossalai.layers" in sys.modules and "pipeflow.colossalai.boosters" not in sys.modules
"""


@pytest.mark.slow
def test_a_module_is_made_when_it_is_first_used() -> None:
    ours = ("table", "processes", "engines")
    done = subprocess.run(
        [sys.executable, "-c", f"OURS = {ours!r}\n{LAZILY}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_no_other_package_is_needed() -> None:
    """For the names of both libraries, except for ChatGLM, whose classes are those of transformers."""
    optional = ("transformers", "peft", "safetensors", "tensorboard", "torchvision", "timm")
    paths = [face.full(path) for face in FACES for path in face.modules() if not path.startswith(OF_TRANSFORMERS)]
    source = f"""
import sys
sys.modules.update(dict.fromkeys({optional!r}))
from importlib import import_module
import pipeflow
for path in {paths!r}:
    import_module(path)
try:
    import pipeflow.colossalai.shardformer.modeling.chatglm2_6b.modeling_chatglm
except pipeflow.UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "this needs the package transformers: pip install" in done.stdout


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("pipeflow.tensor", "pipeflow.engine.tensor"),
        ("pipeflow.parallel.sharding", "pipeflow.engine.parallel.sharding"),
        ("pipeflow.pipelining.schedules", "pipeflow.adapters.pipelining.schedules"),
        ("pipeflow.pipelining._backward", "torch.distributed.pipelining._backward"),
    ],
)
def test_a_short_path_is_another_name_of_the_same_module(short: str, long: str) -> None:
    assert importlib.import_module(short) is importlib.import_module(long)


def test_a_module_that_a_short_path_does_not_have_is_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pipeflow\.engine\.tensor\.never"):
        importlib.import_module("pipeflow.tensor.never")


def test_threads_may_import_a_short_path_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_long_path.py").write_text("import time\ntime.sleep(0.2)\nname = 7\n", encoding="utf-8")
    stand = "from pipeflow.core.face import stand_for\nstand_for(__name__, 'slow_long_path')\n"
    (tmp_path / "quick_short_path.py").write_text(stand, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def imported() -> int:
        from quick_short_path import name  # type: ignore[import-not-found]  # written above

        return int(name)

    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(imported)
            while "quick_short_path" not in sys.modules:
                time.sleep(0.001)
            assert [pool.submit(imported).result(), first.result()] == [7, 7]
    finally:
        for each in ("quick_short_path", "slow_long_path"):
            sys.modules.pop(each, None)
        _SHORT_PATHS.long.pop("quick_short_path")
