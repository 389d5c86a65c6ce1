"""Rules of optimizers: the rate, the weight decay and the number of steps with which each weight is stepped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeflow.checking.findings import Cause, Difference
from pipeflow.checking.runs import Run
from pipeflow.checking.two_runs import TwoRuns

KEYS = ("lr", "weight_decay", "step")
WORDS = {
    "lr": ("the learning rate", "who steps the schedule of the rate, and on which ranks"),
    "weight_decay": ("the weight decay", "the groups of parameters that have a weight decay"),
    "step": ("the number of steps before", "whether the optimizer has lost its state, or steps twice"),
}
Rule = Mapping[str, float]


def of_rule(both: TwoRuns, first: Difference) -> Cause | None:
    """The rule of a weight's step that is another in the candidate, of any rank; None if they are alike or unknown."""
    mine = [rule for _, rule in _rules(both.reference, first)]
    for rank, rule in _rules(both.candidate, first, both):
        for key in KEYS if mine else ():
            if key in rule and key in mine[0] and abs(rule[key] - mine[0][key]) > 1e-6 * abs(mine[0][key]):
                what, look = WORDS[key]
                told = f"{what} of {first.parameter} is {rule[key]:.6g} on rank {rank}, and {mine[0][key]:.6g} in the "
                return Cause("optimizer", f"the gradients are right, and {told}reference", look)
    return None


def _rules(run: Run, first: Difference, both: TwoRuns | None = None) -> Iterable[tuple[int, Rule]]:
    """The rules of the first difference's parameter, by rank; `both` has the names of the candidate."""
    for rank, event in run.events(first.step, "rules"):
        for name, rule in event["rules"].items():
            known = name if both is None else both.names.tensors.get((rank, name))
            if known == first.parameter:
                yield rank, dict(zip(KEYS, rule, strict=True))


def rules_of(optimizer: Any) -> dict[int, list[float]]:
    """The rule of each parameter by its id, for optimizers with the groups and states of torch's."""
    found = {}
    states = getattr(optimizer, "state", {})
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            steps = states.get(parameter, {}).get("step", 0) if isinstance(states, Mapping) else 0
            given = (group.get("lr", 0.0), group.get("weight_decay", 0.0), steps)
            found[id(parameter)] = [float(each) for each in given]
    return found
