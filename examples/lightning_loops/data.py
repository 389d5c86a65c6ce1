"""Small data for the scripts here, made from fixed random numbers."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

Loader = DataLoader[tuple[torch.Tensor, ...]]


class ByEpoch(RandomSampler):
    """Shuffles by the number of the epoch, so that a run that goes on reads what it would have read without a stop."""

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls it before each epoch."""
        self.generator = torch.Generator().manual_seed(epoch)


def digits(samples: int = 160, batch: int = 16, seed: int = 0, shuffle: bool = True) -> Loader:
    """Images of 8 x 8 points, of which one quarter is brighter, with its number as label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    images = torch.rand(samples, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, label // 2 * 4 :, label % 2 * 4 :][:4, :4] += 0.5
    return DataLoader(TensorDataset(images, labels), batch_size=batch, sampler=ByEpoch(images) if shuffle else None)


def words(samples: int = 160, batch: int = 16, length: int = 17) -> Loader:
    """Sequences that count modulo 50, from different starts."""
    starts = torch.randint(50, (samples,), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset((starts[:, None] + torch.arange(length)) % 50), batch_size=batch, shuffle=True)
