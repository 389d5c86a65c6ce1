"""First values: those that the class of transformers gives, the same under every layout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, RLock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.adapters.huggingface.skeleton import Blueprint
from pipeflow.huggingface import from_config, from_pretrained, save_pretrained
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import RankError
from tests.covering import some
from tests.huggingface.models import MORE, changed, made, saved, stored
from tests.stages.families import FAMILIES

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TWO = make_schedule("1f1b", ranks=2, microbatches=3)
EVERY = {**FAMILIES, **MORE}
NAMED = ("gpt2", "t5", "swinv2", "mixtral")
EACH = [pytest.param(name, marks=[] if name in NAMED else [pytest.mark.exhaustive]) for name in EVERY]


def blueprint(name: str, dtype: torch.dtype = torch.float32) -> Blueprint:
    kind, config, sizes, _ = EVERY[name]
    return Blueprint(getattr(transformers, kind), getattr(transformers, config)(**sizes), dtype)


@pytest.mark.parametrize("name", EACH)
def test_a_skeleton_is_the_model_without_its_parameters(name: str) -> None:
    plan = blueprint(name)
    plain, skeleton = plan.kind(plan.config), plan.skeleton()
    assert [key for key, _ in skeleton.named_parameters()] == [key for key, _ in plain.named_parameters()]
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    for (key, mine), (other, its) in zip(skeleton.named_parameters(), plain.named_parameters(), strict=True):
        assert (key, mine.shape, mine.dtype, mine.requires_grad) == (other, its.shape, its.dtype, its.requires_grad)
    for (key, mine), (other, its) in zip(skeleton.named_buffers(), plain.named_buffers(), strict=True):
        assert key == other
        assert torch.equal(mine, its)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", EACH)
def test_values_are_those_of_the_class_and_of_each_parameter_alone(name: str) -> None:
    plan = blueprint(name)
    torch.manual_seed(1)
    plain = dict(plan.kind(plan.config).named_parameters())
    before = torch.get_rng_state()
    whole = plan.initial(list(plain), seed=3)
    apart = {
        key: value for each in (list(plain)[::2], list(plain)[1::2]) for key, value in plan.initial(each, 3).items()
    }
    assert torch.equal(before, torch.get_rng_state())
    assert whole.keys() == apart.keys() == plain.keys()
    drawn = 0
    for key, value in whole.items():
        assert torch.equal(value, apart[key]), key
        its = plain[key].detach()
        if (its.numel() > 1 and its.std() == 0) or torch.equal(value, its):
            assert torch.equal(value, its), key
        elif its.numel() > 200:
            drawn += 1
            assert float(value.std()) == pytest.approx(float(its.std()), rel=0.3), key
            assert abs(float(value.mean() - its.mean())) < 7 * float(its.std()) / its.numel() ** 0.5, key
    assert drawn > 3
    other = plan.initial(list(plain), seed=4)
    assert any(not torch.equal(value, other[key]) for key, value in whole.items())


@pytest.mark.exhaustive
def test_parameters_that_stay_in_float32_do() -> None:
    skeleton = blueprint("t5", torch.float16).skeleton()
    found = {parameter.dtype for name, parameter in skeleton.named_parameters() if name.endswith("wo.weight")}
    assert found == {torch.float32}
    assert {parameter.dtype for parameter in skeleton.parameters()} == {torch.float16, torch.float32}
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.exhaustive
def test_models_that_threads_make_at_once_leave_the_default_dtype_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread comes while the first one has another default, and waits for it."""
    inside, waiting = Event(), Event()

    class Announcing:
        """A lock that says when the second thread comes to it."""

        def __init__(self) -> None:
            self.lock = RLock()

        def __enter__(self) -> None:
            if inside.is_set():
                waiting.set()
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()

    class Slow(nn.Linear):
        """Its constructor ends when another thread waits."""

        def __init__(self, config: object) -> None:
            super().__init__(2, 2)
            inside.set()
            assert waiting.wait(30)

    monkeypatch.setattr("pipeflow.adapters.huggingface.skeleton.ONE_AT_A_TIME", Announcing())
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Blueprint(Slow, None, torch.float64).skeleton)
        assert inside.wait(30)
        second = threads.submit(Blueprint(Slow, None, torch.float16).skeleton)
        assert [each.result().weight.dtype for each in (first, second)] == [torch.float64, torch.float16]
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # for the tests after this one, if it fails
    assert found is torch.float32


LAYOUTS: dict[str, tuple[Schedule, int]] = {
    "one": (make_schedule("gpipe", ranks=1, microbatches=2), 1),
    "two": (make_schedule("1f1b", ranks=2, microbatches=2), 1),
    "interleaved": (make_schedule("interleaved-1f1b", ranks=2, microbatches=2, chunks=2), 1),
    "both ways": (make_schedule("dualpipe-v", ranks=2, microbatches=4), 1),
    "tensor": (make_schedule("1f1b", ranks=2, microbatches=2), 2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", some(["gpt2", "llama-tied", "t5"], ["llama-tied"]))
def test_weights_do_not_depend_on_the_layout(name: str, tmp_path: Path) -> None:
    _, batch = made(transformers, name)
    batch = {key: torch.cat([value, value])[:4] for key, value in batch.items()}
    plan = blueprint(name)
    found: dict[str, Any] = {}
    for label, (schedule, tensor) in LAYOUTS.items():

        def rank(schedule: Schedule = schedule, folder: Path = tmp_path / label) -> float:
            model = from_config(plan.config, schedule, batch, kind=plan.kind, dtype=torch.float32, seed=5)
            assert model.training
            save_pretrained(model, folder)
            loss = execute_pipeline(iter([batch]), model, broadcast_loss=True).loss
            assert loss is not None
            return loss.item()

        [first, *_] = run_threads(rank, schedule.placement.num_ranks * tensor, tensor=tensor)
        found[label] = stored(tmp_path / label), first
    weights, loss = found["one"]
    for other, its_loss in found.values():
        assert weights.keys() == other.keys()
        assert all(torch.equal(weights[key], other[key]) for key in weights)
        assert its_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.exhaustive
def test_a_head_that_the_folder_lacks_is_new_on_every_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers has it, with a warning; what is asked for by name comes without one."""
    module, _ = made(transformers, "bert")
    folder = saved(module, tmp_path / "base")
    plan = blueprint("bert-classifier")
    batch = EVERY["bert-classifier"][3]()
    heads: list[dict[str, Tensor]] = []
    for ranks in (1, 2):
        schedule = make_schedule("1f1b", ranks=ranks, microbatches=3)

        def rank(schedule: Schedule = schedule, folder_after: Path = tmp_path / str(ranks)) -> None:
            kind = transformers.AutoModelForSequenceClassification
            model = from_pretrained(folder, schedule, batch, kind=kind, config=plan.config, dtype=torch.float32)
            save_pretrained(model, folder_after)

        caplog.clear()
        run_threads(rank, ranks)
        [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "lacks bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, classifier.weight" in (
            warning.getMessage()
        )
        tensors = stored(tmp_path / str(ranks))
        heads.append({key: value for key, value in tensors.items() if "pooler" in key or "classifier" in key})
        word = "bert.embeddings.word_embeddings.weight"
        assert torch.equal(tensors[word], stored(folder)[word].float())
    assert len(heads[0]) == 4
    assert all(torch.equal(heads[0][key], heads[1][key]) for key in heads[0])
    assert not heads[0]["classifier.bias"].any()


@pytest.mark.exhaustive
def test_a_module_is_new_when_it_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, batch = made(transformers, "bert-classifier")
    folder = saved(module, tmp_path / "before")
    changed(folder, lambda tensors: tensors.update({"classifier.weight": torch.zeros(7, 32)}))

    def rank() -> None:
        schedule = make_schedule("1f1b", ranks=2, microbatches=3)
        save_pretrained(from_pretrained(folder, schedule, batch, new=["classifier"]), tmp_path / "after")

    run_threads(rank, 2)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    after, before = stored(tmp_path / "after"), stored(folder)
    assert after["classifier.weight"].shape == (3, 32)
    assert float(after["classifier.weight"].std()) == pytest.approx(0.02, rel=0.3)
    assert all(torch.equal(after[key], before[key]) for key in before if "classifier" not in key)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_script_can_ask_for_the_size_of_the_vocabulary_and_needs_no_example(tensor: int) -> None:
    module, batch = made(transformers, "llama")
    rows = module.get_input_embeddings().weight.shape[0]

    def rank() -> tuple[int, str, float | None]:
        model = from_config(module.config, TWO, kind=type(module), dtype=torch.float64)
        found = model.get_input_embeddings().weight.shape[0]
        assert model.resize_token_embeddings(rows).weight.shape[0] == found
        with pytest.raises(UsageError, match=rf"cannot resize its embeddings from {rows} to {rows + 1} rows: resize"):
            model.resize_token_embeddings(rows + 1)
        loss = execute_pipeline(iter([batch]), model, broadcast_loss=True).loss
        return found, type(model.config).__name__, None if loss is None else loss.item()

    results = run_threads(rank, 2 * tensor, tensor=tensor)
    assert {(found, name) for found, name, _ in results} == {(rows, "LlamaConfig")}
    assert all(loss is not None and loss > 0 for _, _, loss in results)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "labels"), [(None, 1), (None, 3), ("multi_label_classification", 3), ("regression", 3)]
)
def test_a_classifier_of_any_kind_needs_no_example(kind: str | None, labels: int) -> None:
    module, _ = made(transformers, "bert")
    config = transformers.BertConfig(**{**module.config.to_dict(), "num_labels": labels, "problem_type": kind})
    words, is_class = torch.ones(6, 5, dtype=torch.long), kind is None and labels > 1
    batch = {"input_ids": words, "labels": torch.zeros(6, dtype=torch.long) if is_class else torch.rand(6, labels)}

    def rank() -> float:
        model = from_config(config, TWO, kind=transformers.BertForSequenceClassification)
        loss = execute_pipeline(iter([batch]), model, broadcast_loss=True).loss
        assert loss is not None
        return loss.item()

    assert min(run_threads(rank, 2)) > 0


@pytest.mark.exhaustive
def test_a_classifier_that_looks_for_a_token_needs_an_example() -> None:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64}
    with pytest.raises(RankError, match="no example batch is known for BartForSequenceClassification: pass one"):
        run_threads(
            lambda: from_config(transformers.BartConfig(**sizes), TWO, kind=transformers.BartForSequenceClassification),
            2,
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTForMaskedImageModeling"])
def test_a_model_of_images_needs_no_example(kind: str) -> None:
    module, batch = made(transformers, "vit")
    config = module.config
    config.encoder_stride = config.patch_size
    images = batch["pixel_values"].float()
    if kind == "ViTForMaskedImageModeling":
        masks = torch.ones(len(images), (config.image_size // config.patch_size) ** 2, dtype=torch.long)
        batch = {"pixel_values": images, "bool_masked_pos": masks}
    else:
        batch = {"pixel_values": images, "labels": torch.zeros(len(images), dtype=torch.long)}

    def rank() -> float:
        model = from_config(config, TWO, kind=kind, dtype=torch.float32)
        loss = execute_pipeline(iter([batch]), model, broadcast_loss=True).loss
        assert loss is not None
        return loss.item()

    assert min(run_threads(rank, 2)) > 0
