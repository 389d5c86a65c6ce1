"""Sixty ways to write a loss, as public training programs do, and whether pipeflow finds what each is divided by."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

LENGTH, CLASSES, IGNORED = 6, 11, -100
Loss = Callable[[Tensor, Tensor], Tensor]


class Form(NamedTuple):
    """A loss of scores (B, LENGTH, CLASSES) and labels (B, LENGTH), some of which are IGNORED.

    Attributes:
        loss: the loss.
        weigh: what its microbatches are weighed by, if pipeflow does not find it.
        is_found: whether it does.
    """

    loss: Loss
    is_found: bool = True
    weigh: Callable[[Tensor], float] | None = None


def flat(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return scores.reshape(-1, CLASSES), labels.reshape(-1)


def each_token(scores: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token, 0 where the label is ignored."""
    return functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def mask_of(labels: Tensor) -> Tensor:
    return (labels != IGNORED).double()


def hot(labels: Tensor) -> Tensor:
    return functional.one_hot(labels.clamp(min=0), CLASSES).double()


def mean_ce(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y))


def sum_over_count(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), reduction="sum") / counted(y)


def sum_over_clamped(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), reduction="sum") / counted(y).clamp(min=1)


def sum_over_read(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), reduction="sum") / counted(y).item()


def sum_over_max_of_read(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), reduction="sum") / max(1, int(counted(y)))


def sum_over_numel(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), reduction="sum") / y.numel()


def sum_over_samples(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), reduction="sum") / y.size(0)


def masked_mean(z: Tensor, y: Tensor) -> Tensor:
    """Megatron-LM's: the losses and the mask as vectors."""
    losses, mask = each_token(z, y).view(-1), mask_of(y).view(-1)
    return torch.sum(losses * mask) / mask.sum()


def normalized_mask(z: Tensor, y: Tensor) -> Tensor:
    mask = mask_of(y)
    return (each_token(z, y) * (mask / mask.sum())).sum()


def shifted(z: Tensor, y: Tensor) -> Tensor:
    """transformers': labels are those of the next token."""
    return functional.cross_entropy(z[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1))


def padded_shift(z: Tensor, y: Tensor) -> Tensor:
    labels = functional.pad(y, (0, 1), value=IGNORED)[:, 1:].contiguous()
    return functional.cross_entropy(*flat(z, labels))


def picked(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(z[y != IGNORED], y[y != IGNORED])


def picked_places(z: Tensor, y: Tensor) -> Tensor:
    scores, labels = flat(z, y)
    places = (labels != IGNORED).nonzero().squeeze(1)
    return functional.cross_entropy(scores[places], labels[places])


def masked_select(z: Tensor, y: Tensor) -> Tensor:
    return torch.masked_select(each_token(z, y), y != IGNORED).mean()


def with_z_loss(z: Tensor, y: Tensor) -> Tensor:
    """OLMo's and PaLM's: the squares of the normalizers of the tokens that count."""
    mask = y != IGNORED
    return mean_ce(z, y) + 1e-2 * ((z.logsumexp(-1) ** 2) * mask).sum() / mask.sum()


def with_z_loss_of_all(z: Tensor, y: Tensor) -> Tensor:
    return mean_ce(z, y) + 1e-2 * (z.logsumexp(-1) ** 2).mean()


def added_in_place(z: Tensor, y: Tensor) -> Tensor:
    loss = mean_ce(z, y)
    loss += 0.1 * z.square().mean()
    return loss


def three_terms(z: Tensor, y: Tensor) -> Tensor:
    first = functional.cross_entropy(z[:, 0], y[:, 0].clamp(min=0))
    return torch.stack([mean_ce(z, y), 0.5 * first, z.square().mean()]).sum()


def mean_of_sequences(z: Tensor, y: Tensor) -> Tensor:
    """Each sequence's mean over its tokens, then the mean over sequences."""
    mask = mask_of(y)
    return ((each_token(z, y) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def by_gather(z: Tensor, y: Tensor) -> Tensor:
    probabilities = z.log_softmax(-1)
    chosen = probabilities.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * mask_of(y)).sum() / mask_of(y).sum()


def by_filled_gather(z: Tensor, y: Tensor) -> Tensor:
    pad = y.eq(IGNORED)
    chosen = -z.log_softmax(-1).gather(-1, y.masked_fill(pad, 0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(pad, 0.0).sum() / (~pad).sum()


def smoothed_by_hand(z: Tensor, y: Tensor) -> Tensor:
    """fairseq's: sums of both parts over the number of tokens."""
    probabilities, pad = z.log_softmax(-1), y.eq(IGNORED).unsqueeze(-1)
    right = -probabilities.gather(-1, y.clamp(min=0).unsqueeze(-1)).masked_fill(pad, 0.0)
    smooth = -probabilities.sum(-1, keepdim=True).masked_fill(pad, 0.0)
    eps = 0.1 / (CLASSES - 1)
    return ((1 - 0.1 - eps) * right.sum() + eps * smooth.sum()) / counted(y)


def smoothed(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), label_smoothing=0.1)


def class_weights(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), weight=torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64))


def class_weights_by_hand(z: Tensor, y: Tensor) -> Tensor:
    table = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
    weight = table[y.clamp(min=0)] * mask_of(y)
    return (each_token(z, y) * weight).sum() / weight.sum()


def smoothed_class_weights(z: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
    return functional.cross_entropy(*flat(z, y), weight=weight, label_smoothing=0.1)


def soft_labels(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(z.transpose(1, 2), (hot(y) * 0.9 + 0.1 / CLASSES).transpose(1, 2))


def soft_labels_by_hand(z: Tensor, y: Tensor) -> Tensor:
    return -(hot(y) * z.log_softmax(-1)).sum(-1).mean()


def mixed_up(z: Tensor, y: Tensor) -> Tensor:
    """Mixup with labels of the same sample."""
    other = y.flip(1)
    return 0.7 * mean_ce(z, y) + 0.3 * mean_ce(z, other)


def focal(z: Tensor, y: Tensor) -> Tensor:
    losses = each_token(z, y)
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def focal_of_counted(z: Tensor, y: Tensor) -> Tensor:
    losses = each_token(z, y)
    return ((1 - torch.exp(-losses)) ** 2 * losses).sum() / counted(y)


def focal_sigmoid(z: Tensor, y: Tensor) -> Tensor:
    """torchvision's, with the number of positive labels as divisor."""
    wanted = hot(y)
    chance = z.sigmoid()
    losses = functional.binary_cross_entropy_with_logits(z, wanted, reduction="none")
    near = chance * wanted + (1 - chance) * (1 - wanted)
    return (losses * (1 - near) ** 2).sum() / wanted.sum()


def dice_of_samples(z: Tensor, y: Tensor) -> Tensor:
    chance, wanted = z.softmax(-1).flatten(1), hot(y).flatten(1)
    return (1 - (2 * (chance * wanted).sum(1) + 1) / (chance.sum(1) + wanted.sum(1) + 1)).mean()


def multi_label(z: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(z, hot(y))


def multi_label_positive(z: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(1.0, 3.0, CLASSES, dtype=torch.float64)
    return functional.binary_cross_entropy_with_logits(z, hot(y), pos_weight=weight)


def multi_label_margin(z: Tensor, y: Tensor) -> Tensor:
    return functional.multilabel_soft_margin_loss(z.mean(1), hot(y).amax(1))


def binary_of_chances(z: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy(z.sigmoid(), hot(y))


def squares(z: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(z, hot(y))


def squares_by_hand(z: Tensor, y: Tensor) -> Tensor:
    return ((z - hot(y)) ** 2).mean()


def masked_squares(z: Tensor, y: Tensor) -> Tensor:
    """As masked autoencoders: the mean of each patch, over the patches that are masked."""
    mask = mask_of(y)
    return (((z - hot(y)) ** 2).mean(dim=-1) * mask).sum() / mask.sum()


def huber(z: Tensor, y: Tensor) -> Tensor:
    return functional.smooth_l1_loss(z, hot(y), beta=0.5)


def absolute(z: Tensor, y: Tensor) -> Tensor:
    return functional.l1_loss(z[:, 0], hot(y)[:, 0])


def norms(z: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(z - hot(y), dim=-1)
    return found.mean()


def weighted_samples(z: Tensor, y: Tensor) -> Tensor:
    weight = mask_of(y).sum(1)
    return (each_token(z, y).mean(1) * weight).sum() / weight.sum()


def weighted_samples_by_dot(z: Tensor, y: Tensor) -> Tensor:
    weight = mask_of(y).sum(1)
    return each_token(z, y).mean(1) @ weight / weight.sum()


def distillation(z: Tensor, y: Tensor) -> Tensor:
    teacher = (hot(y) * 3).log_softmax(-1)
    soft = functional.kl_div((z / 2).log_softmax(-1), teacher, log_target=True, reduction="batchmean") * 4
    return 0.5 * soft + 0.5 * mean_ce(z, y)


def distillation_of_tokens(z: Tensor, y: Tensor) -> Tensor:
    teacher = (hot(y) * 3).softmax(-1)
    losses = functional.kl_div(z.log_softmax(-1), teacher, reduction="none").sum(-1)
    return (losses * mask_of(y)).sum() / counted(y)


def entropy_bonus(z: Tensor, y: Tensor) -> Tensor:
    probabilities = z.log_softmax(-1)
    return mean_ce(z, y) + 0.01 * (probabilities.exp() * probabilities).sum(-1).mean()


def direct_preference(z: Tensor, y: Tensor) -> Tensor:
    """DPO on pairs within a sample: the first half of the tokens is chosen, the second rejected."""
    chosen = (-each_token(z, y)).unflatten(1, (2, -1)).sum(-1)
    return -functional.logsigmoid(0.1 * (chosen[:, 0] - chosen[:, 1])).mean()


def policy(z: Tensor, y: Tensor) -> Tensor:
    """PPO's clipped ratio with advantages, over the tokens that count."""
    chosen = -each_token(z, y)
    advantage = (y.double() - 5).tanh()
    ratio = (chosen - chosen.detach()).exp()
    losses = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (losses * mask_of(y)).sum() / mask_of(y).sum()


def hinge(z: Tensor, y: Tensor) -> Tensor:
    return functional.multi_margin_loss(z[:, 0], y[:, 0].clamp(min=0))


def margin(z: Tensor, y: Tensor) -> Tensor:
    return functional.margin_ranking_loss(z[:, 0, 0], z[:, 1, 0], torch.where(y[:, 0] > 4, 1.0, -1.0).double())


def cosine(z: Tensor, y: Tensor) -> Tensor:
    return (1 - functional.cosine_similarity(z, hot(y), dim=-1)).mean()


def triplet(z: Tensor, y: Tensor) -> Tensor:
    return functional.triplet_margin_loss(z[:, 0], z[:, 1], z[:, 2])


def gaussian(z: Tensor, y: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(z[..., 0], y.double(), z[..., 1].exp())


def poisson(z: Tensor, y: Tensor) -> Tensor:
    return functional.poisson_nll_loss(z[..., 0], y.clamp(min=0).double())


def connectionist(z: Tensor, y: Tensor) -> Tensor:
    words = y[:, :2].clamp(min=1)
    sizes = torch.full((len(y),), LENGTH), torch.full((len(y),), 2)
    return functional.ctc_loss(z.log_softmax(-1).transpose(0, 1), words, *sizes, reduction="sum")


def last_token(z: Tensor, y: Tensor) -> Tensor:
    """Of the last token that counts, as in classifiers of sequences."""
    last = (mask_of(y).cumsum(1) * mask_of(y)).argmax(1)
    rows = torch.arange(len(y))
    return functional.cross_entropy(z[rows, last], y[rows, last].clamp(min=0))


def chosen_if_some(z: Tensor, y: Tensor) -> Tensor:
    total, count = (each_token(z, y) * mask_of(y)).sum(), mask_of(y).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.zeros_like(total))


def with_eps(z: Tensor, y: Tensor) -> Tensor:
    return (each_token(z, y) * mask_of(y)).sum() / (mask_of(y).sum() + 1e-8)


def in_a_buffer(z: Tensor, y: Tensor) -> Tensor:
    """Written to a buffer before it is added up, as heads that are fused with their loss do."""
    losses = torch.zeros(y.numel(), dtype=z.dtype)
    losses[:].copy_((each_token(z, y) * mask_of(y)).flatten())
    return losses.sum() / mask_of(y).sum()


def over_nonzero(z: Tensor, y: Tensor) -> Tensor:
    return each_token(z, y).sum() / torch.count_nonzero(mask_of(y))


def contracted(z: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bt,bt->", each_token(z, y), mask_of(y).double()) / mask_of(y).sum()


def with_own_negatives(z: Tensor, y: Tensor) -> Tensor:
    """MoCo's: the first score of each sample is that of its pair, the others are those of a queue."""
    one, other = functional.normalize(z[:, 0], dim=-1), functional.normalize(z[:, 1], dim=-1).detach()
    scores = torch.cat([(one * other).sum(-1, keepdim=True), one @ torch.eye(CLASSES, dtype=z.dtype)], 1)
    return functional.cross_entropy(scores, torch.zeros(len(z), dtype=torch.long))


def plain_sum(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z, y), reduction="sum")


def in_float(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(z.double(), y), ignore_index=IGNORED).mean()


def bits(z: Tensor, y: Tensor) -> Tensor:
    return mean_ce(z, y) / math.log(2)


def dice(z: Tensor, y: Tensor) -> Tensor:
    chance, wanted = z.softmax(-1), hot(y)
    return 1 - (2 * (chance * wanted).sum() + 1) / (chance.sum() + wanted.sum() + 1)


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    """InfoNCE: each sample is compared with all others."""
    one, other = functional.normalize(z[:, 0], dim=-1), functional.normalize(z[:, 1], dim=-1)
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(z)))


def clip(z: Tensor, y: Tensor) -> Tensor:
    similar = z[:, 0] @ z[:, 1].T
    numbers = torch.arange(len(z))
    return (functional.cross_entropy(similar, numbers) + functional.cross_entropy(similar.T, numbers)) / 2


def decorrelated(z: Tensor, y: Tensor) -> Tensor:
    """Barlow Twins': a matrix of sums over samples, whose squares are added up."""
    one, other = (each - each.mean(0) for each in (z[:, 0], z[:, 1]))
    matrix = one.T @ other / len(z)
    return (matrix - torch.eye(CLASSES, dtype=z.dtype)).square().sum()


def perplexity(z: Tensor, y: Tensor) -> Tensor:
    return mean_ce(z, y).exp()


def root(z: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(z, hot(y)).sqrt()


def rolled(z: Tensor, y: Tensor) -> Tensor:
    """Compares each sample with the one before."""
    return (z - z.roll(1, 0)).square().mean()


def by_loss(z: Tensor, y: Tensor) -> Tensor:
    losses = each_token(z, y)
    weight = losses.detach()
    return (losses * weight).sum() / weight.sum()


def balanced(z: Tensor, y: Tensor) -> Tensor:
    """The balance of a mixture's router: a product of two means over tokens."""
    share = z.softmax(-1).mean((0, 1))
    return mean_ce(z, y) + 0.1 * (share * share).sum()


BY_COUNT = {"count": counted}
FOUND = [
    *(mean_ce, sum_over_count, sum_over_clamped, sum_over_read, sum_over_max_of_read, sum_over_numel, sum_over_samples),
    *(masked_mean, normalized_mask, shifted, padded_shift, picked, picked_places, masked_select, with_z_loss),
    *(
        with_z_loss_of_all,
        added_in_place,
        in_a_buffer,
        over_nonzero,
        contracted,
        with_own_negatives,
        three_terms,
        mean_of_sequences,
        by_gather,
        by_filled_gather,
        smoothed_by_hand,
    ),
    *(smoothed, class_weights, class_weights_by_hand, smoothed_class_weights, soft_labels, soft_labels_by_hand),
    *(mixed_up, focal, focal_of_counted, focal_sigmoid, dice_of_samples, multi_label, multi_label_positive),
    *(multi_label_margin, binary_of_chances, squares, squares_by_hand, masked_squares, huber, absolute, norms),
    *(weighted_samples, weighted_samples_by_dot, distillation, distillation_of_tokens, entropy_bonus),
    *(direct_preference, policy, hinge, margin, cosine, triplet, gaussian, poisson, connectionist, last_token),
    *(chosen_if_some, with_eps, plain_sum, in_float, bits),
]
WHOLE = [dice, contrastive, clip, decorrelated, perplexity, root, rolled, by_loss, balanced]
"""Losses that are no sums over samples."""
