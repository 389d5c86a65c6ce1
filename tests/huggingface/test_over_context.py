"""Training models of transformers over context ranks is training in one process with the model's own attention: losses,
norms, every gradient, every weight. What is not known to be so is one clear error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.adapters.cut_model import PreparedModel, cut_settings
from pipeflow.adapters.huggingface.own_loss import OwnLoss
from pipeflow.adapters.random_states import seed_of_layers
from pipeflow.engine.parallel.context import current_context
from pipeflow.huggingface import CausalLMLoss, Trainer, from_config, from_pretrained, share_tokens
from pipeflow.testing import RankError, run_processes, run_threads
from tests.covering import covering, some_rows
from tests.huggingface.over_context import LENGTH, MASKED, Trained, Work, require_trained, train, train_in_one_process
from tests.huggingface.test_shared_tokens import model_of
from tests.runtime.test_context_ranks import refused

SAMPLES = {1: (3,), 2: (3, 5)}
PLAIN = ("llama", "qwen3", "gpt2", "mistral", "olmo2", "qwen2")
NAMES = ("1f1b", "zb-v", "interleaved-1f1b")
LAYOUTS = ((2, 2, 1, 1), (2, 2, 2, 1), (2, 2, 1, 2), (2, 2, 2, 2), (4, 1, 1, 1))
"""Numbers of context, pipeline and tensor ranks, and of replicas."""
COLUMNS = PLAIN, NAMES, LAYOUTS, (False, True)
FEW = [
    ("llama", "zb-v", (2, 2, 1, 1), True),
    ("gpt2", "1f1b", (2, 2, 1, 2), False),
    ("qwen3", "interleaved-1f1b", (2, 2, 2, 1), False),
]
ROWS = [*FEW, *(row for row in covering(*COLUMNS) if row not in FEW)]


@cache
def expected(kind: str, samples: tuple[int, ...], masked: bool, padded: bool) -> Trained:
    return train_in_one_process(Work(kind, samples=samples, masked=masked, padded=padded))


def run(runner: Callable[..., Any], work: Work, context: int = 2, tensor: int = 1, how: str = "gather") -> None:
    data = len(work.samples)
    ranks = context * work.pipeline * tensor * data
    options = {"context": context, "tensor": tensor, "data": data, "context_attention": how}
    results = runner(train, ranks, work, work.model(), **options)
    require_trained(results, expected(work.kind, work.samples, work.masked, work.padded))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "layout", "recomputed"),
    some_rows([*FEW, *(row for row in covering(*COLUMNS) if row not in FEW)], FEW),
)
def test_models(kind: str, name: str, layout: tuple[int, int, int, int], recomputed: bool) -> None:
    context, pipeline, tensor, data = layout
    run(run_threads, Work(kind, name, pipeline, SAMPLES[data], recomputed=recomputed), context, tensor)


@pytest.mark.slow
def test_keys_of_fewer_heads_from_one_rank_at_a_time() -> None:
    run(run_threads, Work("qwen3", pipeline=1), how="ring")


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_heads_of_all_tokens(kind: str) -> None:
    """With two heads of keys for four ranks, windows and documents."""
    run(run_threads, Work(kind, pipeline=1, masked=True), 4, how="all_to_all")


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("kind", "context", "how"),
    [
        ("llama", 2, "gather"),
        ("modernbert", 2, "gather"),
        ("bert", 4, "all_to_all"),
        ("mistral", 2, "gather"),
        ("gpt2", 2, "all_to_all"),
        ("bert", 2, "gather"),
        ("modernbert", 4, "all_to_all"),
    ],
)
def test_padding(kind: str, context: int, how: str) -> None:
    run(run_threads, Work(kind, pipeline=1, padded=True, masked=kind == "mistral"), context, how=how)


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "name", "layout", "how"),
    [
        ("bert", "1f1b", (2, 1, 1, 1), "ring"),
        ("modernbert", "zb-v", (2, 2, 1, 1), "gather"),
        ("bert", "interleaved-1f1b", (2, 2, 2, 1), "gather"),
        ("modernbert", "1f1b", (2, 2, 1, 2), "all_to_all"),
    ],
)
def test_models_whose_tokens_see_later_ones(kind: str, name: str, layout: tuple[int, int, int, int], how: str) -> None:
    """Windows of ModernBERT reach to both sides."""
    context, pipeline, tensor, data = layout
    run(run_threads, Work(kind, name, pipeline, SAMPLES[data]), context, tensor, how)


@pytest.mark.slow
def test_a_ring_hides_no_documents() -> None:
    with pytest.raises(RankError, match="without dropout, windows, padding and packed documents alone"):
        run(run_threads, Work("llama", pipeline=1, masked=True), how="ring")


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("kind", MASKED)
def test_windows_and_packed_documents(kind: str) -> None:
    """Documents end in the parts of either rank, and windows reach from one rank's tokens into the other's."""
    run(run_threads, Work(kind, pipeline=1, masked=True))


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("kind", MASKED)
def test_windows_and_packed_documents_in_slices(kind: str) -> None:
    run(run_threads, Work(kind, pipeline=1, slices=3, masked=True), 1)


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("kind", MASKED)
def test_windows_and_packed_documents_in_slices_over_context_ranks(kind: str) -> None:
    run(run_threads, Work(kind, slices=3, masked=True))


@pytest.mark.slow
def test_keys_of_slices_from_one_rank_at_a_time() -> None:
    run(run_threads, Work("qwen3", pipeline=1, slices=3, recomputed=True), how="ring")


@pytest.mark.slow
def test_packed_documents_of_whole_sequences() -> None:
    run(run_threads, Work("llama", pipeline=1, masked=True), 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "tensor"), [*product(("gemma3_text", "phi3", "cohere", "qwen3_moe"), (1, 2))])
def test_other_families_in_stages(kind: str, tensor: int) -> None:
    run(run_threads, Work(kind, "zb-v", masked=True, recomputed=True), 2, tensor)


@pytest.mark.exhaustive
def test_gloo() -> None:
    run(run_processes, Work("llama", "zb-v", masked=True))


def trained_by_own_loss(work: Work, whole: Any) -> tuple[float, dict[str, Any]]:
    """The model's own loss of a batch that is a dict, and its gradients: of a Pipeline, and as accelerate calls it."""
    inputs, labels = work.batch(0, 1)
    batch, context, model = {**inputs, "labels": labels}, current_context(), share_tokens(deepcopy(whole))
    if work.kind == "llama":
        pipeline: Any = Pipeline.from_module(model, work.schedule, batch)
        loss = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True).loss
        assert loss is not None
    else:
        settings = cut_settings("1f1b", 2, None, None, None, None, "microbatches", None, None, context, None)
        pipeline = PreparedModel(model, settings, context)
        loss = pipeline(**batch).loss
        loss.backward()
    return loss.item(), {name: each.grad for name, each in pipeline.named_parameters() if each.grad is not None}


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "modernbert"])
def test_the_loss_of_the_model_itself(kind: str) -> None:
    """It is computed in float32. One rank has no label in the first microbatch."""
    work = Work(kind, pipeline=1, masked=True)
    model = work.model()
    inputs, labels = work.batch(0, 1)
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    for its, gradients in run_threads(trained_by_own_loss, 2, work, work.model(), context=2):
        assert its == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-7)


def data() -> list[dict[str, Tensor]]:
    tokens = torch.randint(1, 48, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each, "labels": each, "position_ids": torch.arange(LENGTH)} for each in tokens]


def trained_by(kind: Any, model: Any, folder: str) -> list[float]:
    options: dict[str, Any] = {"max_steps": 2, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    options |= {"logging_steps": 1, "save_strategy": "no", "prediction_loss_only": True, "learning_rate": 1e-2}
    arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=4, **options)
    trainer = kind(model, arguments, train_dataset=data(), eval_dataset=data()[:4])
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, float(trainer.evaluate()["eval_loss"])]


def trained_by_trainer(folder: str) -> list[float]:
    schedule = make_schedule("1f1b", ranks=1, microbatches=2)
    return trained_by(Trainer, from_pretrained(f"{folder}/model", schedule), f"{folder}/run")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_needs_no_more_than_the_launch(tmp_path: Path) -> None:
    """`from_pretrained` makes the model ready, and its example has positions."""
    model_of("llama").float().save_pretrained(tmp_path / "model")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = trained_by(transformers.Trainer, whole, str(tmp_path / "run"))
    for losses in run_threads(trained_by_trainer, 2, str(tmp_path), context=2):
        assert losses == pytest.approx(expected, rel=1e-5)


SCHEDULE = make_schedule("1f1b", ranks=1, microbatches=1)


def made(change: Callable[[dict[str, Any]], object], *, shares: bool = True, criterion: Any = None) -> Pipeline:
    inputs, labels = Work("llama").batch(0, 0)
    entries: dict[str, Any] = dict(inputs)
    change(entries)
    model = model_of("llama")
    model = share_tokens(model) if shares else model
    return Pipeline.from_module(model, SCHEDULE, (entries, labels), criterion=criterion or CausalLMLoss())


def without_positions(entries: dict[str, Any]) -> None:
    del entries["position_ids"]


def own_positions(entries: dict[str, Any]) -> None:
    entries["position_ids"] = torch.arange(LENGTH).flip(0).expand(3, -1)


def padded(entries: dict[str, Any]) -> None:
    entries["attention_mask"] = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool)


def own_loss_of_another_kind() -> Pipeline:
    inputs, labels = Work("llama").batch(0, 0)
    model = share_tokens(model_of("llama"))
    del vars(model)["shifted"]
    return Pipeline.from_module(model, SCHEDULE, {**inputs, "labels": labels})


def outputs() -> object:
    inputs, labels = Work("llama").batch(0, 0)
    return execute_pipeline(
        iter([(inputs, labels)]), made(lambda entries: None), forward_only=True, return_outputs=True
    )


def without_labels() -> object:
    context = current_context()
    settings = cut_settings("1f1b", 1, None, None, None, None, "microbatches", None, None, context, None)
    return PreparedModel(share_tokens(model_of("llama")), settings, context)(**Work("llama").batch(0, 0)[0])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no positions": (lambda: made(without_positions), "context ranks need position_ids in each batch"),
    "other positions": (lambda: made(own_positions), "context ranks need position_ids .* which count from 0"),
    "a mask of pairs": (
        lambda: made(padded),
        r"an entry for each token of input_ids, \(batch, length\), but 'attention_mask' is \(3, 1, 16, 16\)",
    ),
    "another model": (
        lambda: made(lambda _: None, shares=False),
        r"LlamaForCausalLM is not .* call share_tokens\(model\)",
    ),
    "another loss": (
        own_loss_of_another_kind,
        r"the module's own loss is not known .* pass criterion=GPTLMLoss\(\), CausalLMLoss\(\)",
    ),
    "outputs": (outputs, "outputs cannot be returned over context ranks"),
    "a script's loss": (without_labels, "cannot divide the labels of a loss that a script computes"),
    "a trainer's loss": (lambda: OwnLoss(Trainer, made(lambda _: None)), "computes a loss of its own"),
    "compiled code": (
        lambda: made(lambda _: None).compile(),
        "waits for context ranks in its attention: do not compile",
    ),
    "a bidirectional model": (
        lambda: from_config(transformers.RobertaConfig(architectures=["RobertaForMaskedLM"]), SCHEDULE),
        r"it is not known whether tokens of RobertaForMaskedLM \(roberta\) meet in attention alone",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_known_is_refused_before_the_first_step(what: str) -> None:
    call, error = REFUSED[what]
    assert all(re.search(error, each) for each in run_threads(refused, 2, call, context=2))


def masked_call() -> Any:
    model = share_tokens(model_of("llama"))
    return model(torch.ones(1, 8, dtype=torch.long), attention_mask=torch.tensor([[1] * 6 + [0] * 2]))


def test_padding_is_never_left_out() -> None:
    """Also if the model is called without a pipeline."""
    said = "attention_mask is not possible with context ranks"
    assert all(said in each for each in run_threads(refused, 2, masked_call, context=2))


def seed() -> int:
    return seed_of_layers(7, current_context())


def test_masks_of_dropout_differ_on_context_ranks() -> None:
    assert len(set(run_threads(seed, 4, context=2, data=2))) == 4
