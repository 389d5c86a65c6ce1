"""Optimizers of a whole module whose groups keep a rank's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import UsageError
from pipeflow.training.optim.optimizer import WholeGroups, names_of


def test_a_rank_gets_its_part_of_the_states_of_a_whole_optimizer() -> None:
    """Of the last layer, whose parameters are in both groups."""
    last: Any = nn.Linear(3, 4)
    whole = nn.Sequential(nn.Linear(2, 3), last)

    def optimizer() -> torch.optim.Adam:
        weights, biases = [[each for each in whole.parameters() if each.dim() == dim] for dim in (2, 1)]
        groups: Any = [{"params": weights, "lr": 0.1}, {"params": biases}]
        return torch.optim.Adam(groups)

    trained, mine = optimizer(), optimizer()
    whole(torch.ones(2, 2)).sum().backward()
    trained.step()
    groups = WholeGroups(mine, names_of(whole))
    groups.keep([("1.weight", last.weight), ("1.bias", last.bias)])
    mine.load_state_dict(groups.part_of(trained.state_dict()))
    assert [group["lr"] for group in mine.param_groups] == [0.1, 1e-3]
    for parameter in last.parameters():
        torch.testing.assert_close(mine.state[parameter], trained.state[parameter])
    with pytest.raises(UsageError, match="other groups"):
        groups.part_of(torch.optim.Adam(whole.parameters()).state_dict())
