"""Trainers of TRL that train a Pipeline as one process does. Where TRL is missing, they are skipped: see `make trl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeflow import Pipeline, UsageError, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
trl: Any = pytest.importorskip("trl", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

import datasets  # type: ignore[import-not-found]  # noqa: E402  # TRL needs it
import pyarrow  # type: ignore[import-not-found]  # noqa: E402  # datasets needs it
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402  # after the skip

from pipeflow.adapters.libraries import transformers_library  # noqa: E402  # after the skip
from pipeflow.huggingface import pipelined  # noqa: E402  # after the skip

transformers: Any = transformers_library()
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]
KINDS: dict[str, tuple[Any, Any]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
}


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def texts(kind: str) -> Any:
    """Texts of three to eight words."""
    generator = torch.Generator().manual_seed(1)

    def text() -> str:
        length = int(torch.randint(3, 9, (), generator=generator))
        return " ".join(WORDS[index] for index in torch.randint(3, 63, (length,), generator=generator))

    names = ["text"] if kind == "sft" else ["prompt", "chosen", "rejected"]
    rows = pyarrow.Table.from_pylist([{name: f" {text()}" for name in names} for _ in range(70)])
    return datasets.Dataset(datasets.table.InMemoryTable(rows), fingerprint=kind)  # which it need not compute


def make(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 63, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, pad_token_id=0, eos_token_id=1, num_labels=1)
    return (transformers.LlamaForSequenceClassification if kind == "reward" else transformers.LlamaForCausalLM)(config)


def cut(module: Any) -> Pipeline:
    words = torch.ones(4, 6, dtype=torch.long)
    batch = {"input_ids": words, "attention_mask": words}
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=4)
    return Pipeline.from_module(module, schedule, batch)


def arguments(kind: str, folder: Path, samples: int, **more: Any) -> Any:
    options: dict[str, Any] = {"max_steps": 20, "logging_steps": 1, "learning_rate": 1e-3, "save_strategy": "no"}
    options |= {"per_device_train_batch_size": samples, "per_device_eval_batch_size": samples, "report_to": []}
    options |= {"gradient_accumulation_steps": 2, "use_cpu": True, "disable_tqdm": True, "log_level": "error"}
    return KINDS[kind][1](str(folder), **(options | more), bf16=False, gradient_checkpointing=False)


def results(trainer: Any) -> tuple[list[float], float, float]:
    trainer.train()
    evaluated = trainer.evaluate()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, evaluated["eval_loss"], evaluated["eval_num_tokens"]


def trained(kind: str, folder: Path) -> tuple[list[float], float, float]:
    """On a rank."""
    more = {"ref_model": cut(make(kind, 1))} if kind == "dpo" else {}
    return results(trainer_of(pipelined(KINDS[kind][0]), kind, cut(make(kind)), folder, 8, **more))


def trainer_of(trains: Any, kind: str, model: Any, folder: Path, samples: int, **more: Any) -> Any:
    data = {"train_dataset": texts(kind), "eval_dataset": texts(kind).select(range(20))}
    return trains(model, args=arguments(kind, folder, samples), **data, processing_class=tokenizer(), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    more = {"ref_model": make(kind, 1)} if kind == "dpo" else {}
    losses, judged, tokens = results(trainer_of(KINDS[kind][0], kind, make(kind), tmp_path, 8, **more))
    for its, its_judged, its_tokens in run_processes(trained, 2, kind, tmp_path, deadline=300.0):
        assert its == pytest.approx(losses, abs=1e-5)
        assert its_judged == pytest.approx(judged, abs=1e-5)
        assert its_tokens == tokens


PACKED: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "max_length": 16},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "without padding": {"padding_free": True, "max_length": None},
}


def trained_packed(trains: Any, model: Any, options: dict[str, Any], folder: Path) -> list[float]:
    made = arguments("sft", folder, 4, max_steps=2, **options)
    trainer = trains(model, args=made, train_dataset=texts("sft"), processing_class=tokenizer())
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def trained_packed_in_stages(way: str, folder: Path) -> list[float]:
    return trained_packed(pipelined(trl.SFTTrainer), cut(make("sft")), PACKED[way], folder)


@pytest.mark.parametrize("way", PACKED)
def test_packed_texts_train_as_in_one_process(way: str, tmp_path: Path) -> None:
    """A batch is one row of several texts, with their positions and where each of them begins."""
    expected = trained_packed(trl.SFTTrainer, make("sft"), PACKED[way], tmp_path)
    for losses in run_processes(trained_packed_in_stages, 2, way, tmp_path, deadline=300.0):
        assert losses == pytest.approx(expected, abs=1e-5)


def trained_beside_itself(folder: Path) -> tuple[list[float], float, float]:
    return results(trainer_of(pipelined(trl.DPOTrainer), "dpo", cut(make("dpo")), folder, 8))


def test_without_a_reference_model_it_is_the_trained_one_as_it_was(tmp_path: Path) -> None:
    """TRL loads it from the model's folder."""
    losses, judged, _ = results(trainer_of(trl.DPOTrainer, "dpo", make("dpo"), tmp_path, 8, ref_model=make("dpo")))
    assert losses[0] != pytest.approx(losses[-1], abs=1e-2)
    for its, its_judged, _ in run_processes(trained_beside_itself, 2, tmp_path, deadline=300.0):
        assert its == pytest.approx(losses, abs=1e-5)
        assert its_judged == pytest.approx(judged, abs=1e-5)


def test_a_reference_model_that_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    def rank() -> None:
        with pytest.raises(
            UsageError, match=r"the reference model must be a Pipeline .*, got Llama.*: leave ref_model"
        ):
            trainer_of(pipelined(trl.DPOTrainer), "dpo", cut(make("dpo")), tmp_path, 8, ref_model=make("dpo"))

    run_threads(rank, 1)


def test_metrics_of_an_sft_trainer_are_refused(tmp_path: Path) -> None:
    """It calls the model once for the loss, and again for the logits."""

    def rank() -> None:
        trainer = trainer_of(pipelined(trl.SFTTrainer), "sft", cut(make("sft")), tmp_path, 8, compute_metrics=dict)
        with pytest.raises(
            UsageError, match=r"SFTTrainer\.compute_loss cannot be computed in stages: it must call its"
        ):
            trainer.evaluate()

    run_threads(rank, 1)
