"""LoRA under the Trainer: adapters are trained, saved and resumed as transformers' own Trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pipeflow import Pipeline, UsageError
from pipeflow.adapters.libraries import transformers_library
from pipeflow.huggingface import from_pretrained
from pipeflow.testing import run_threads
from tests.huggingface.trainers import BATCH, given, make_arguments, make_data, make_module, make_trainer, schedule_here

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
peft = pytest.importorskip("peft", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SAVING: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "learning_rate": 0.05}


def adapted() -> Any:
    """A model with adapters. They start from the same random numbers, in a generator that ranks do not share."""
    module = peft.get_peft_model(make_module("llama"), config(task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_A" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return module


def config(**options: Any) -> Any:
    return peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], **options)


def example() -> dict[str, torch.Tensor]:
    batch = make_data("llama", BATCH)
    return {name: torch.stack([sample[name] for sample in batch]) for name in batch[0]}


def trained(
    folder: Path, base: dict[str, torch.Tensor], resume: Path | None = None, **options: Any
) -> tuple[list[float], Any]:
    """The losses, and the logits of 5 samples. What was trained at the end is in the folder `final`."""
    module = adapted()
    module.load_state_dict(base)
    trainer = make_trainer(
        "llama", folder, model=Pipeline.from_module(module, schedule_here(), example()), **(SAVING | options)
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model(str(folder / "final"))
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, trainer.predict(make_data("llama", 5)).predictions


@pytest.fixture
def base() -> dict[str, torch.Tensor]:
    """The weights that every run starts from: threads that make models at once draw from one generator."""
    found: dict[str, torch.Tensor] = adapted().state_dict()
    return found


def logits_of(model: Any) -> Any:
    """Those of 5 samples."""
    batch = {key: torch.stack([each[key] for each in make_data("llama", 5)]) for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model.eval()(**batch).logits.numpy()


def logits_in_peft(folder: Path) -> Any:
    return logits_of(peft.PeftModel.from_pretrained(make_module("llama"), folder))


@pytest.mark.exhaustive
def test_adapters_are_trained_saved_and_resumed(tmp_path: Path, base: dict[str, torch.Tensor]) -> None:
    serial = transformers_library().Trainer(adapted(), make_arguments(tmp_path / "serial", **SAVING), **given("llama"))
    serial.train()
    expected = [each["loss"] for each in serial.state.log_history if "loss" in each]
    whole = run_threads(trained, 2, tmp_path / "run", base, deadline=200.0)
    assert abs(whole[0][1] - logits_of(adapted())).max() > 1e-2
    for losses, predicted in whole:
        assert losses == pytest.approx(expected, abs=1e-5)
        for name in ("final", "checkpoint-6"):
            folder = tmp_path / "run" / name
            assert numpy.allclose(predicted, logits_in_peft(folder), atol=1e-5)
            assert sorted(each.name for each in folder.glob("*.safetensors")) == ["adapter_model.safetensors"]
    for losses, predicted in run_threads(trained, 2, tmp_path / "again", base, tmp_path / "run" / "checkpoint-3"):
        assert losses == pytest.approx(expected, abs=1e-5)  # the first three are in the checkpoint's state
        assert numpy.allclose(predicted, whole[0][1], atol=1e-5)


@pytest.mark.exhaustive
def test_a_checkpoint_of_adapters_alone_says_how_it_is_loaded(tmp_path: Path, base: dict[str, torch.Tensor]) -> None:
    run_threads(lambda: trained(tmp_path, base, save_only_model=True), 2, deadline=200.0)

    def resumed() -> None:
        with pytest.raises(
            UsageError, match=r"save_only_model=True: load the model that they adapt .*, adapters=folder\)"
        ):
            trained(tmp_path, base, tmp_path / "checkpoint-3")

    def loaded() -> None:
        with pytest.raises(UsageError, match=r"has adapters of peft, without the model: .* adapters=folder"):
            from_pretrained(tmp_path / "checkpoint-3", schedule_here(), example())

    run_threads(resumed, 2)
    run_threads(loaded, 2)


@pytest.mark.exhaustive
def test_a_pipeline_cannot_be_adapted_after_it_was_cut(tmp_path: Path) -> None:
    make_module("llama").save_pretrained(tmp_path / "model")

    def rank() -> None:
        model = from_pretrained(tmp_path / "model", schedule_here(), example())
        for each in (peft.get_peft_model(model, config()), model):
            with pytest.raises(
                UsageError, match=r"peft was applied to the Pipeline: call peft\.get_peft_model.* first"
            ):
                make_trainer("llama", tmp_path, model=each)

    run_threads(rank, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_module("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trained_from(folder: Path, adapters: Any, out: Path) -> tuple[list[float], Any]:
    """The losses, and the logits of 5 samples. The adapters are in the folder `out` at the end."""
    model = from_pretrained(folder, schedule_here(), adapters=adapters, seed=3)
    assert all(each.requires_grad == ("lora" in name or "save" in name) for name, each in model.named_parameters())
    trainer = make_trainer("llama", out, model=model, **(SAVING | {"max_steps": 3, "save_strategy": "no"}))
    trainer.train()
    trainer.save_model(str(out))
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, trainer.predict(make_data("llama", 5)).predictions


def trained_serially(adapted_model: Any, folder: Path) -> list[float]:
    arguments = make_arguments(folder, **(SAVING | {"max_steps": 3, "save_strategy": "no"}))
    trainer = transformers_library().Trainer(adapted_model, arguments, **given("llama"))
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def loaded_whole(folder: Path) -> Any:
    return transformers_library().AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.exhaustive
def test_adapters_are_added_where_a_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    """New ones, with a head that is trained in full, are those of peft; saved ones go on."""
    first = config(modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    whole = loaded_whole(folder)
    torch.manual_seed(3)
    expected = trained_serially(peft.get_peft_model(whole, first), tmp_path / "serial")
    for losses, predicted in run_threads(trained_from, 2, folder, first, tmp_path / "out", deadline=200.0):
        assert losses == pytest.approx(expected, abs=1e-5)
        saved = peft.PeftModel.from_pretrained(loaded_whole(folder), tmp_path / "out")
        assert numpy.allclose(predicted, logits_of(saved), atol=1e-5)
    again = peft.PeftModel.from_pretrained(loaded_whole(folder), tmp_path / "out", is_trainable=True)
    expected = trained_serially(again, tmp_path / "serial")
    for losses, _ in run_threads(trained_from, 2, folder, tmp_path / "out", tmp_path / "more", deadline=200.0):
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.exhaustive
def test_adapters_that_cannot_be_added_are_refused(folder: Path, tmp_path: Path) -> None:
    refused = {
        r"first values of .*lora_magnitude.* depend on the weights of the model": config(use_dora=True),
        r"peft cannot add these adapters to a LlamaForCausalLM .*: Target modules": peft.LoraConfig(
            target_modules=["x"]
        ),
        r"has no adapters: pass a folder with peft's adapter_config\.json": tmp_path,
        r"adapters must be a configuration of peft, .* got 7": 7,
    }

    def rank() -> None:
        for message, adapters in refused.items():
            with pytest.raises(UsageError, match=message):
                from_pretrained(folder, schedule_here(), adapters=adapters)

    run_threads(rank, 1)
