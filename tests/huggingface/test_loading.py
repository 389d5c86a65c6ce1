"""from_pretrained and save_pretrained against transformers itself; float64."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.adapters.huggingface.pretrained import module_of
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.huggingface import from_pretrained, save_pretrained
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import RankError
from pipeflow.training.checkpoint import tensor_files
from tests.covering import some
from tests.huggingface.models import MORE, RATE, changed, logits, made, saved, stored, trained
from tests.stages.families import EVERY, FAMILIES

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MAJOR = int(transformers.__version__.partition(".")[0])
ONE = make_schedule("gpipe", ranks=1, microbatches=3)
TWO = make_schedule("1f1b", ranks=2, microbatches=3)
NAMED = {1: ("llama-tied", "gpt2", "vit", "bert-classifier"), 2: ("t5", "mixtral")}
ROUNDED = {"gemma2": 1e-5, "mixtral": 1e-6, "qwen3-moe": 1e-6}
"""Norms, and the probabilities of a router, that are computed in float32."""

EACH = [
    pytest.param(name, tensor, marks=[] if name in NAMED[tensor] else [pytest.mark.exhaustive])
    for name in [*FAMILIES, *MORE]
    for tensor in (1, 2)
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "tensor"), EACH)
def test_load_train_save_and_load_again(name: str, tensor: int, tmp_path: Path) -> None:
    if MAJOR < 5 and name in ("mixtral", "qwen3-moe"):
        pytest.skip("before transformers 5 experts decide by values what they compute, so they are not cut")
    module, batch = made(transformers, name)
    folder = saved(module, tmp_path / "before", max_shard_size="40KB")
    expected = logits(trained(module, batch, 3), batch)  # first: BEiT keeps a table that its first forward makes

    def rank() -> None:
        config = copy.deepcopy(module.config)
        weigh = EVERY[name].weigh if name in EVERY else None
        model = from_pretrained(folder, TWO, batch, config=config, kind=type(module), dtype=torch.float64, weigh=weigh)
        assert not model.training
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(3):
            execute_pipeline(iter([batch]), model)
            optimizer.step()
            optimizer.zero_grad()
        save_pretrained(model, tmp_path / "after")

    run_threads(rank, 2 * tensor, tensor=tensor, deadline=200.0)
    back, told = type(module).from_pretrained(tmp_path / "after", dtype=torch.float64, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert stored(tmp_path / "after").keys() == stored(folder).keys()
    back.config._experts_implementation = getattr(module.config, "_experts_implementation", None)
    tolerance = ROUNDED.get(name, 1e-9) * max(1.0, float(expected.abs().max()))
    assert (logits(back, batch) - expected).abs().max() < tolerance


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", some([1, 2], [2]))
def test_a_rank_reads_what_it_owns(tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of what is split over the tensor ranks its part; whole files that hold nothing of it stay unread."""
    module, batch = made(transformers, "llama")
    folder = saved(module, tmp_path, max_shard_size="20KB")
    read: Counter[int] = Counter()
    opened = tensor_files.opened_file

    def counting(file: Path) -> Any:
        return _Counting(opened(file), read)

    monkeypatch.setattr(tensor_files, "opened_file", counting)

    def rank() -> tuple[int, int, int]:
        model = from_pretrained(folder, TWO, batch)
        owned = sum(parameter.nbytes for parameter in model.parameters())
        return model.context.rank, owned, len(splits_of(model))

    results = run_threads(rank, 2 * tensor, tensor=tensor)
    assert sum(read.values()) == sum(owned for _, owned, _ in results)
    whole = sum(parameter.nbytes for parameter in module.parameters())
    assert all(owned < 0.8 * whole / tensor for _, owned, _ in results)
    assert all((splits > 0) == (tensor > 1) for _, _, splits in results)


class _Counting:
    """What counts the bytes that are read of a file."""

    def __init__(self, opened: Any, read: Counter[int]) -> None:
        self._opened, self._read = opened, read

    def get_slice(self, name: str) -> Any:
        return _CountingSlice(self._opened.get_slice(name), self._read)

    def __enter__(self) -> Any:
        return self._opened

    def __exit__(self, *error: object) -> None:
        pass


class _CountingSlice:
    def __init__(self, inner: Any, read: Counter[int]) -> None:
        self._inner, self._read = inner, read
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    def __getitem__(self, where: Any) -> torch.Tensor:
        found: torch.Tensor = self._inner[where]
        self._read[0] += found.nbytes
        return found


@pytest.mark.exhaustive
def test_only_parameters_of_its_own_are_ever_in_memory(tmp_path: Path) -> None:
    module, batch = made(transformers, "gpt2")
    folder = saved(module, tmp_path)

    def rank() -> tuple[set[str], set[str]]:
        model = from_pretrained(folder, TWO, batch)
        [chunk] = model.chunks
        ghosts = {
            f"{name}.{key}"
            for name, each in chunk.named_modules()
            for key, value in vars(each).items()
            if isinstance(value, torch.Tensor) and value.dim() and value.untyped_storage().nbytes() <= 8
        }
        return {name for name, _ in model.named_parameters()}, ghosts

    names = {name for name, _ in module.named_parameters()}
    for owned, ghosts in run_threads(rank, 2):
        assert owned | ghosts == names
        assert not owned & ghosts


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, "LlamaForCausalLM"),
        ("AutoModelForCausalLM", "LlamaForCausalLM"),
        ("LlamaForCausalLM", "LlamaForCausalLM"),
        ("AutoModelForSequenceClassification", "LlamaForSequenceClassification"),
    ],
)
def test_the_class_is_named_or_that_of_the_configuration(kind: str | None, expected: str, tmp_path: Path) -> None:
    module, batch = made(transformers, "llama")
    module.config.pad_token_id = 0
    folder = saved(module, tmp_path)
    given = getattr(transformers, kind) if kind is not None and "Auto" in kind else kind
    batch = {**batch, "labels": torch.arange(3) % 2} if "Sequence" in expected else batch

    def rank() -> tuple[str, torch.dtype]:
        model = from_pretrained(folder, ONE, batch, kind=given)
        parameter = next(model.parameters())
        return type(module_of(model)).__name__, parameter.dtype

    assert run_threads(rank, 1) == [(expected, torch.float64)]


@pytest.mark.exhaustive
def test_one_rank_writes_one_file_and_what_generation_needs(tmp_path: Path) -> None:
    module, batch = made(transformers, "llama")
    module.generation_config.max_new_tokens = 7
    folder = saved(module, tmp_path / "before")

    def rank() -> None:
        save_pretrained(from_pretrained(folder, ONE, batch, dtype=torch.float32), tmp_path / "after")

    run_threads(rank, 1)
    names = {file.name for file in (tmp_path / "after").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype="auto")
    assert (type(back), back.dtype) == (type(module), torch.float32)
    assert back.generation_config.max_new_tokens == 7


@pytest.mark.exhaustive
def test_a_pipeline_of_a_model_that_is_there_is_saved_too(tmp_path: Path) -> None:
    module, batch = made(transformers, "bert")

    def rank() -> None:
        model = Pipeline.from_module(copy.deepcopy(module), make_schedule("zb-v", ranks=2, microbatches=3), batch)
        save_pretrained(model, tmp_path)

    run_threads(rank, 2)
    back = type(module).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(back, batch), logits(module, batch))


@pytest.mark.exhaustive
def test_a_configuration_of_another_program_stays(tmp_path: Path) -> None:
    module, batch = made(transformers, "bert")
    (tmp_path / "config.json").write_text('{"port": 80}', encoding="utf-8")

    def rank() -> None:
        model = Pipeline.from_module(copy.deepcopy(module), ONE, batch)
        with pytest.raises(UsageError, match=r"config.json was not written by transformers: save to a new folder"):
            save_pretrained(model, tmp_path)

    run_threads(rank, 1)
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [
        ("config.json", '{"port": 80}')
    ]


def test_a_failed_save_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = made(transformers, "llama")
    folder = saved(module, tmp_path / "good")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    package = tensor_files.package()
    save_file = package.torch.save_file
    broken: list[int] = []

    def failing(tensors: Any, path: Path, **options: Any) -> None:
        if broken and "-1-" in path.name:
            raise OSError("the disk is full")
        save_file(tensors, path, **options)

    monkeypatch.setattr(package.torch, "save_file", failing)

    def rank() -> list[str]:
        model = from_pretrained(folder, TWO, batch)
        for parameter in model.parameters():
            parameter.data.zero_()
        broken.append(1)
        told = []
        for path in (folder, tmp_path / "fresh"):
            try:
                save_pretrained(model, path)
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
        return told

    told = run_threads(rank, 2)
    assert all("the disk is full" in each for one in told for each in one)
    assert [len(one) for one in told] == [2, 2]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not (tmp_path / "fresh" / "config.json").exists()


@pytest.mark.exhaustive
def test_files_of_others_stay_and_stale_ones_of_its_own_go(tmp_path: Path) -> None:
    module, batch = made(transformers, "llama")
    folder = saved(module, tmp_path, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")

    def rank() -> None:
        save_pretrained(from_pretrained(folder, TWO, batch), folder)

    run_threads(rank, 2)
    assert (folder / "tokenizer.json").exists()
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert torch.equal(logits(type(module).from_pretrained(folder, dtype=torch.float64), batch), logits(module, batch))


@pytest.mark.exhaustive
def test_only_models_of_transformers_are_saved(tmp_path: Path) -> None:
    def rank() -> None:
        plain = Pipeline.from_module(torch.nn.Sequential(torch.nn.Linear(2, 2)), ONE, (torch.ones(3, 2), None))
        save_pretrained(plain, tmp_path)

    with pytest.raises(RankError, match="needs a Pipeline of a transformers model, but the model is a Sequential"):
        run_threads(rank, 1)


@pytest.mark.exhaustive
def test_names_of_base_models_and_of_older_checkpoints(tmp_path: Path) -> None:
    """GPT-2 without its head, a BERT with TensorFlow's names, a tied weight under its second name, too."""
    gpt2, batch = made(transformers, "gpt2")
    bare = saved(gpt2.transformer, tmp_path / "bare")
    whole = saved(gpt2, tmp_path / "whole")
    bert, its_batch = made(transformers, "bert")
    old = saved(bert, tmp_path / "old")
    tied, its_words = made(transformers, "llama-tied")
    twice = saved(tied, tmp_path / "twice")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            renamed = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            tensors[renamed] = tensors.pop(name)

    changed(old, rename)
    changed(twice, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(64, 32)}))
    without_labels = {name: entry for name, entry in batch.items() if name != "labels"}

    def rank() -> list[dict[str, torch.Tensor]]:
        models = [
            from_pretrained(bare, TWO, batch, kind=type(gpt2)),
            from_pretrained(whole, TWO, without_labels, kind=transformers.GPT2Model),
            from_pretrained(old, TWO, its_batch),
            from_pretrained(twice, TWO, its_words),
        ]
        return [dict(model.named_parameters()) for model in models]

    for found in run_threads(rank, 2):
        for parameters, module in zip(found, (gpt2, gpt2.transformer, bert, tied), strict=True):
            expected = dict(module.named_parameters())
            assert parameters
            assert all(torch.equal(value, expected[name]) for name, value in parameters.items())
