"""What the Trainer refuses, its callbacks, and embeddings that were resized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import Pipeline, UsageError
from pipeflow.testing import run_threads

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from pipeflow.adapters.libraries import transformers_library  # noqa: E402  # after the skip
from pipeflow.huggingface import Trainer  # noqa: E402  # after the skip
from tests.huggingface.trainers import make_arguments, make_module, make_pipeline, make_trainer, schedule_here  # noqa: E402  # same

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True, "use_cpu": True}, "fp16"),
    ({"bf16": True}, "autocast=torch.bfloat16"),
    ({"torch_compile": True}, "torch_compile"),
    ({"gradient_checkpointing": True}, "gradient_checkpointing_enable"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True.* it patches the whole model: apply it to the module before"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ({"optim": "galore_adamw", "optim_target_modules": ["attn"]}, "galore_adamw"),
    ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ({"save_only_model": True, "load_best_model_at_end": True}, "save_only_model"),
    ({"save_on_each_node": True}, "save_on_each_node"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    def rank() -> None:
        model = make_pipeline("bert")
        with pytest.raises(UsageError, match=told):
            make_trainer("bert", tmp_path, model=model, **options)

    run_threads(rank, 1)


@pytest.mark.parametrize("name", ["activation_offloading", "precompute_ref_log_probs", "sync_ref_model"])
def test_arguments_of_trl_are_refused_by_name(name: str, tmp_path: Path) -> None:
    def rank() -> None:
        model, arguments = make_pipeline("bert"), make_arguments(tmp_path)
        setattr(arguments, name, True)
        with pytest.raises(UsageError, match=rf"TrainingArguments\({name}=True\) is not possible with a pipeline"):
            Trainer(model, arguments)

    run_threads(rank, 1)


@pytest.mark.exhaustive
def test_other_models_are_refused(tmp_path: Path) -> None:
    def rank() -> None:
        arguments = make_arguments(tmp_path)
        with pytest.raises(UsageError, match="got Linear"):
            Trainer(nn.Linear(1, 1), arguments)  # type: ignore[arg-type]  # what is refused
        with pytest.raises(UsageError, match="from_module"):
            Trainer(Pipeline(nn.Linear(1, 1), schedule_here()), arguments)

    run_threads(rank, 1)


def test_callbacks_are_called_on_every_rank_and_stop_training(tmp_path: Path) -> None:
    class Watch(transformers_library().TrainerCallback):  # type: ignore[misc]  # transformers has its own types
        def __init__(self) -> None:
            self.told: list[str] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.told.append(f"step {state.global_step}")
            control.should_training_stop = state.global_step == 2

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if state.is_world_process_zero:
                self.told.append("log")

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            self.told.append(type(model).__name__)

    def rank() -> list[str]:
        watch = Watch()
        make_trainer("bert", tmp_path, callbacks=[watch]).train()
        return watch.told

    first, second = run_threads(rank, 2)
    assert first == ["step 1", "log", "step 2", "log", "log", "Pipeline"]
    assert second == ["step 1", "step 2", "Pipeline"]


ROWS = 80  # after the model's 64


def words() -> list[dict[str, torch.Tensor]]:
    """Some are tokens that were added."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, ROWS, (24, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def losses_of(trains: Any, model: Any, folder: Path) -> list[float]:
    trainer = trains(model, make_arguments(folder, max_steps=3), train_dataset=words())
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.exhaustive
def test_embeddings_that_were_resized_before_cutting_train_as_in_one_process(tmp_path: Path) -> None:
    """They are tied to the head, which has as many rows."""
    whole = make_module("llama")
    whole.resize_token_embeddings(ROWS)
    weights = {name: each.clone() for name, each in whole.state_dict().items()}
    expected = losses_of(transformers_library().Trainer, whole, tmp_path)

    def rank() -> list[float]:
        module = make_module("llama")
        module.resize_token_embeddings(ROWS)
        module.load_state_dict(weights)
        example = {name: torch.stack([each[name] for each in words()[:8]]) for name in ("input_ids", "labels")}
        return losses_of(Trainer, Pipeline.from_module(module, schedule_here(), example), tmp_path)

    for losses in run_threads(rank, 2, deadline=200.0):
        assert losses == pytest.approx(expected, abs=1e-5)
