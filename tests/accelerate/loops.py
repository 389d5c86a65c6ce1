"""Loops for tests, as scripts of accelerate have them: the same on accelerate and on pipeflow, and what they see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeflow import UsageError
from pipeflow.adapters.libraries import transformers_library

BATCH = 8


def make_bert(dropout: float = 0.0) -> Any:
    transformers = transformers_library()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    kept = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(**sizes, **kept, num_hidden_layers=4, max_position_embeddings=32, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def make_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    transformers = transformers_library()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4))


def make_words() -> dict[str, Tensor]:
    words = torch.randint(3, 64, (BATCH, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words}


def make_texts(samples: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(3, 64, (8,), generator=generator) for _ in range(samples)]
    return [{"input_ids": each, "labels": each[0] % 3} for each in words]


def accelerator_of(which: str, **options: Any) -> Any:
    """accelerate's, or pipeflow's with the layout of the ranks."""
    if which == "accelerate":
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._reset_state()
        return Accelerator(cpu=True, **options)
    from pipeflow.accelerate import Accelerator as OfPipeline

    return OfPipeline(cpu=True, **options)


def train_texts(which: str, batch: int, *, dropout: float = 0.0) -> list[float]:
    """What nlp_example and gradient_accumulation do: losses, norms, rates, then predictions of each epoch."""
    accelerator = accelerator_of(which, gradient_accumulation_steps=2)
    model = make_bert(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(make_texts(84), batch_size=batch, shuffle=True)  # type: ignore[arg-type]  # a list will do
    check: Any = DataLoader(make_texts(21), batch_size=batch)  # type: ignore[arg-type]
    scheduler = transformers_library().get_linear_schedule_with_warmup(optimizer, 3, 24)
    model, optimizer, loader, check, scheduler = accelerator.prepare(model, optimizer, loader, check, scheduler)
    seen: list[float] = []
    for _ in range(2):
        model.train()
        for entries in loader:
            seen += train_batch(accelerator, model, optimizer, scheduler, entries)
        seen += predictions(accelerator, model, check)
    return seen


def train_batch(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, entries: Any) -> list[float]:
    """The norm, if the batch ends an optimizer's step, the loss and the rate."""
    seen = []
    with accelerator.accumulate(model):
        loss = model(**entries).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [*seen, float(accelerator.gather(loss.detach()[None]).mean()), scheduler.get_last_lr()[0]]


def predictions(accelerator: Any, model: Any, loader: Any) -> list[float]:
    """Logits and labels of all batches."""
    seen: list[float] = []
    model.eval()
    for entries in loader:
        with torch.no_grad():
            output = model(**entries)
        logits, labels = accelerator.gather_for_metrics((output.logits, entries["labels"]))
        assert len(logits) == len(labels)
        seen += [*logits.flatten().tolist(), *map(float, labels.tolist())]
    return seen


class Images(nn.Module):
    """A model that computes no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def make_images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(60, 3, 2, 2, generator=generator)
    labels = images.flatten(1)[:, :5].argmax(1)
    labels[::7] = -100  # microbatches have other numbers of labels
    return TensorDataset(images, labels)


def train_images(which: str, folder: Path | None = None, load: bool = False) -> list[float]:
    """What cv_example and checkpointing do: losses, of which some come after the state was saved, or loaded. The
    gradients of one step are cleared between its forward and its backward.
    """
    accelerator = accelerator_of(which)
    torch.manual_seed(3)
    model: Any = Images()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-2)
    loader: Any = DataLoader(make_images(), batch_size=BATCH, shuffle=True)
    rate: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, epochs=3, steps_per_epoch=len(loader))
    model, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
    seen: list[float] = []
    if load:
        accelerator.load_state(str(folder))
    for epoch in range(1 if load else 0, 3):
        model.train()
        for images, labels in loader:
            noisy = images + 0.1 * torch.randn(images.shape)  # the same on all ranks
            loss = nn.functional.cross_entropy(model(noisy), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            accelerator.backward(loss / 2)
            optimizer.step()
            rate.step()
            seen.append(loss.item())
        if folder is not None and not load and epoch == 0:
            accelerator.save_state(str(folder))
            with pytest.raises(UsageError, match="a part of the weights only"):
                accelerator.get_state_dict(model)
    return seen


def train_folds(which: str, folder: Path) -> list[float]:
    """What cross_validation and profiler do: losses of two models, one after the other. Each rank writes its trace."""
    from accelerate.utils import ProfileKwargs

    accelerator = accelerator_of(which, kwargs_handlers=[ProfileKwargs(output_trace_dir=str(folder))])
    torch.manual_seed(3)
    seen: list[float] = []
    for _ in range(2):
        model: Any = Images()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-2)
        loader: Any = DataLoader(make_images(), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with accelerator.profile() as profiler:
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
        assert profiler.key_averages()
        accelerator.free_memory()
    return seen
