"""Batches of three samples, for models of all kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]


def generator() -> torch.Generator:
    """The same for each batch."""
    return torch.Generator().manual_seed(0)


def words(length: int = 8, first: int = 3) -> Tensor:
    """Numbers of words."""
    return torch.randint(first, 50, (3, length), generator=generator())


def text(length: int = 8) -> Batch:
    """Sentences, one of them shorter, to be continued."""
    numbers = words(length)
    mask = torch.ones_like(numbers)
    mask[0, length - 2 :] = 0
    return {"input_ids": numbers, "attention_mask": mask, "labels": numbers.masked_fill(mask == 0, -100)}


def unlabelled(length: int = 8) -> Batch:
    """For a model without a head."""
    return {"input_ids": words(length)}


def classified(length: int = 8) -> Batch:
    """A class for each sentence."""
    return {**text(length), "labels": torch.arange(3)}


def tagged() -> Batch:
    """A class for each word."""
    return {**text(), "labels": text()["labels"].clamp(max=2)}


def answered() -> Batch:
    """Where in each sentence the answer is."""
    batch = text()
    del batch["labels"]
    return {**batch, "start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([2, 4, 5])}


def chosen() -> Batch:
    """Two sentences a sample, one of which is right."""
    both = torch.randint(3, 50, (3, 2, 8), generator=generator())
    return {"input_ids": both, "labels": torch.tensor([0, 1, 0])}


def pretraining() -> Batch:
    """Words to be guessed, and whether one sentence follows another."""
    return {**text(), "next_sentence_label": torch.tensor([0, 1, 0])}


def pair() -> Batch:
    """Sentences and their translations."""
    return {**text(), "labels": text(6)["labels"]}


def ended() -> Batch:
    """Sentences with an end, and a class for each."""
    return {"input_ids": torch.cat([words(), torch.ones(3, 1).long()], 1), "labels": torch.arange(3)}


def pixels(size: int = 16) -> Tensor:
    """Images of three colours."""
    return torch.randn(3, 3, size, size, dtype=torch.float64, generator=generator())


def image(size: int = 16) -> Batch:
    """A class for each image."""
    return {"pixel_values": pixels(size), "labels": torch.arange(3)}


def picture(size: int = 16) -> Batch:
    """For a model without a head."""
    return {"pixel_values": pixels(size)}


def masked_image(patches: int = 16, size: int = 16) -> Batch:
    """Patches to be painted."""
    mask = torch.zeros(3, patches, dtype=torch.bool)
    mask[:, ::3] = True
    return {"pixel_values": pixels(size), "bool_masked_pos": mask}


def captioned() -> Batch:
    """Images with sentences."""
    return {"pixel_values": pixels(), "input_ids": words()}


def features() -> Tensor:
    """Spectra of sounds."""
    return torch.randn(3, 8, 32, dtype=torch.float64, generator=generator())


def sound() -> Batch:
    """Spectra with what is said."""
    return {"input_features": features(), "labels": text(6)["labels"]}


def sound_class() -> Batch:
    """A class for each sound."""
    return {"input_features": features(), "labels": torch.arange(3)}


def wave() -> Batch:
    """A class for each wave."""
    return {"input_values": torch.randn(3, 400, dtype=torch.float64, generator=generator()), "labels": torch.arange(3)}


def spoken() -> Batch:
    """Waves with what is said."""
    return {**wave(), "labels": torch.randint(1, 8, (3, 4), generator=generator())}


def unmasked() -> Batch:
    """Sentences of one length."""
    return {"input_ids": words(), "labels": words()}


def large() -> Batch:
    """Images that may be halved often."""
    return image(32)


def noisy() -> Batch:
    """Images, and by what their patches are chosen."""
    return {**picture(), "noise": torch.rand(3, 16, generator=generator())}


def matched() -> Batch:
    """Images with sentences, each of which is to find its own."""
    return {**captioned(), "return_loss": True}


def segmented() -> Batch:
    """A class for each pixel."""
    return {"pixel_values": pixels(), "labels": torch.randint(0, 5, (3, 16, 16), generator=generator())}


def video() -> Batch:
    """A class for each few images."""
    frames = torch.randn(3, 4, 3, 16, 16, dtype=torch.float64, generator=generator())
    return {"pixel_values": frames, "labels": torch.arange(3)}


def seen(tokens: int = 16) -> Batch:
    """Images, and sentences that begin with so many places for the image."""
    numbers = torch.cat([torch.full((3, tokens), 2), words()], 1)
    return {"pixel_values": pixels(), "input_ids": numbers, "labels": numbers.masked_fill(numbers == 2, -100)}


def seen_in_patches() -> Batch:
    """The same, where all patches of all images are in one row, and 4 of them are one place."""
    batch = seen(4)
    patches = torch.randn(48, 48, dtype=torch.float64, generator=generator())
    kinds = (batch["input_ids"] == 2).long()
    return {
        **batch,
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 3),
        "mm_token_type_ids": kinds,
    }


def spectrum() -> Batch:
    """A class for each sound."""
    return {"input_values": features().mT, "labels": torch.arange(3)}


def series() -> Batch:
    """What was, and what will be."""
    past = torch.randn(3, 16, 2, dtype=torch.float64, generator=generator())
    return {"past_values": past, "future_values": past[:, -4:].flip(0)}
