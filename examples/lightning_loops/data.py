"""Small data for the scripts here, made from fixed random numbers."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[tuple[torch.Tensor, ...]]


def digits(samples: int = 160, batch: int = 16, seed: int = 0, shuffle: bool = True) -> Loader:
    """Images of 8 x 8 points, of which one quarter is brighter, with its number as label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    images = torch.rand(samples, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, label // 2 * 4 :, label % 2 * 4 :][:4, :4] += 0.5
    return DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=shuffle)


def words(samples: int = 160, batch: int = 16, length: int = 17) -> Loader:
    """Sequences that count modulo 50, from different starts."""
    starts = torch.randint(50, (samples,), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset((starts[:, None] + torch.arange(length)) % 50), batch_size=batch, shuffle=True)
