"""What cannot be loaded, saved or made is one error that says what is there and what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow import UsageError, make_schedule
from pipeflow.huggingface import from_config, from_pretrained
from pipeflow.testing import run_threads
from tests.huggingface.models import changed, made, saved

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MAJOR = int(transformers.__version__.partition(".")[0])
ONE = make_schedule("gpipe", ranks=1, microbatches=3)
TWO = make_schedule("1f1b", ranks=2, microbatches=3)


def told(call: Callable[[], object], ranks: int = 1) -> list[str]:
    """What every rank raised, each a UsageError."""

    def rank() -> str:
        with pytest.raises(UsageError) as caught:
            call()
        return str(caught.value)

    return run_threads(rank, ranks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(made(transformers, "llama")[0], tmp_path / "model")


@pytest.fixture
def batch() -> dict[str, Any]:
    return made(transformers, "llama")[1]


def test_all_that_does_not_fit_is_listed_on_every_rank(folder: Path, batch: dict[str, Any]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(2)
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(48, 16)
        tensors["model.embed_tokens.weight"] = torch.ones(60, 32)

    changed(folder, change)
    found = told(lambda: from_pretrained(folder, TWO, batch), 2)
    assert found[0] == found[1]
    for part in (
        "does not fit LlamaForCausalLM",
        "it lacks model.layers.0.self_attn.k_proj.weight",
        "it lacks model.norm.weight",
        "its model.layers.7.mlp.up_proj.weight is not in the model",
        "its model.layers.3.mlp.up_proj.weight is (48, 16), not (48, 32)",
        "its model.embed_tokens.weight is (60, 32), not (64, 32)",
        "new=[...]",
    ):
        assert part in found[0]


@pytest.mark.exhaustive
def test_no_head_is_new_where_nothing_may_be(folder: Path, batch: dict[str, Any]) -> None:
    changed(folder, lambda tensors: tensors.pop("lm_head.weight"))
    [found] = told(lambda: from_pretrained(folder, ONE, batch, new=()))
    assert "it lacks lm_head.weight" in found
    [found] = told(lambda: from_pretrained(folder, ONE, batch, new=["model.layer"]))
    assert "new has 'model.layer', which is not a module or parameter of the model" in found


@pytest.mark.exhaustive
def test_experts_of_another_shape_or_number(tmp_path: Path) -> None:
    if MAJOR < 5:
        pytest.skip("before transformers 5 experts lie one by one in the model, too")
    module, batch = made(transformers, "mixtral")
    path = saved(module, tmp_path)
    lost = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    changed(path, lambda tensors: tensors.pop(lost))
    [found] = told(lambda: from_pretrained(path, ONE, batch))
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight and 22 other tensors" in found
    changed(path, lambda tensors: tensors.update({lost: tensors[lost.replace("3.w1", "2.w1")][:, :8].clone()}))
    [found] = told(lambda: from_pretrained(path, ONE, batch))
    assert "cannot be converted to model.layers.1.mlp.experts.gate_up_proj" in found


@pytest.mark.exhaustive
def test_folders_that_are_none(folder: Path, batch: dict[str, Any], tmp_path: Path) -> None:
    [found] = told(lambda: from_pretrained("meta-llama/none", ONE, batch))
    assert "meta-llama/none is not a folder" in found
    assert "snapshot_download" in found
    (tmp_path / "empty").mkdir()
    [found] = told(lambda: from_pretrained(tmp_path / "empty", ONE, batch))
    assert "has no config.json" in found
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    [found] = told(lambda: from_pretrained(folder, ONE, batch))
    assert "pytorch_model.bin, a pickle" in found
    assert "save_pretrained" in found
    (folder / "pytorch_model.bin").unlink()
    [found] = told(lambda: from_pretrained(folder, ONE, batch))
    assert "has no weights" in found


def test_damaged_files_are_named(folder: Path, batch: dict[str, Any]) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10" * 40)
    [found] = told(lambda: from_pretrained(folder, ONE, batch))
    assert "model.safetensors is damaged or missing" in found
    (folder / "config.json").write_text("{", encoding="utf-8")
    [found] = told(lambda: from_pretrained(folder, ONE, batch))
    assert "cannot read" in found
    assert "config.json" in found


@pytest.mark.exhaustive
def test_an_index_that_promises_what_no_file_has(tmp_path: Path, batch: dict[str, Any]) -> None:
    path = saved(made(transformers, "llama")[0], tmp_path, max_shard_size="40KB")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    files = sorted(set(content["weight_map"].values()))
    name = "model.norm.weight"
    content["weight_map"][name] = next(file for file in files if file != content["weight_map"][name])
    index.write_text(json.dumps(content), encoding="utf-8")
    [found] = told(lambda: from_pretrained(path, ONE, batch))
    assert f"has no {name!r}, although the index lists it" in found


@pytest.mark.exhaustive
def test_classes_that_are_not_known(folder: Path, batch: dict[str, Any]) -> None:
    config = made(transformers, "llama")[0].config
    config.architectures = None
    [found] = told(lambda: from_config(config, ONE, batch))
    assert "LlamaConfig names no architectures" in found
    assert "kind=" in found
    config.architectures = ["Llama9ForCausalLM"]
    [found] = told(lambda: from_config(config, ONE, batch))
    assert f"transformers {transformers.__version__} has no class 'Llama9ForCausalLM'" in found
    [found] = told(lambda: from_config(config, ONE, batch, kind=transformers.AutoModelForImageClassification))
    assert "AutoModelForImageClassification has no model for a LlamaConfig" in found
    [found] = told(lambda: from_config(config, ONE, batch, kind=torch.nn.Linear))
    assert "kind must be a model class or an auto class of transformers" in found
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**written, "model_type": "llama9"}), encoding="utf-8")
    [found] = told(lambda: from_pretrained(folder, ONE, batch))
    assert f"transformers {transformers.__version__} cannot read" in found
    assert "llama9" in found


@pytest.mark.exhaustive
def test_what_is_quantized_is_refused(folder: Path, batch: dict[str, Any]) -> None:
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    [found] = told(lambda: from_pretrained(folder, ONE, batch))
    assert "quantized" in found


@pytest.mark.exhaustive
def test_dtypes_of_no_floating_point(folder: Path, batch: dict[str, Any]) -> None:
    [found] = told(lambda: from_pretrained(folder, ONE, batch, dtype=torch.int8))
    assert "dtype must be a floating-point torch.dtype" in found


def test_an_error_of_one_rank_is_raised_on_all(folder: Path, batch: dict[str, Any]) -> None:
    def rank() -> str:
        from pipeflow import current_context

        path = folder if current_context().rank else folder / "other"
        with pytest.raises(Exception, match="is not a folder") as caught:
            from_pretrained(path, TWO, batch)
        return type(caught.value).__name__

    assert run_threads(rank, 2) == ["UsageError", "PipelineUsageError"]


@pytest.mark.exhaustive
def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, batch: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    [found] = told(lambda: from_pretrained("anywhere", ONE, batch))
    assert "pip install 'pipeflow-torch[huggingface]'" in found
