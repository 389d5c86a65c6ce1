"""Findings: where two runs differ, as values. Must not contain: how it is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

CAUSES = (
    "scale",
    "missing_tie",
    "missing_microbatch",
    "missing_reduction",
    "masked_tokens",
    "norm",
    "stale",
    "dropout",
    "precision",
    "order",
    "sharding",
    "optimizer",
    "unknown",
)


@dataclass(frozen=True)
class Difference:
    """A place where two runs differ by more than rounding.

    Attributes:
        step: index of the step.
        what: "batch", "weight", "buffer", "output", "loss", "gradient", "norm" or "update".
        module, parameter: names in the reference; "" if it is none.
        stage: the pipeline stage of the candidate that has it; None if it has no stages.
        ranks: the ranks of the candidate that have it.
        error: how far the runs are apart, relative to the reference.
        allowed: how far rounding explains.
        partial: of an output: the ranks' outputs add up to that of the reference.
        lacking: of an output or batch: no rank has some rows of the reference.
    """

    step: int
    what: str
    module: str
    parameter: str
    stage: int | None
    ranks: tuple[int, ...]
    error: float
    allowed: float
    partial: bool = False
    lacking: bool = False


@dataclass(frozen=True)
class Cause:
    """Why two runs differ.

    Attributes:
        name: one of CAUSES.
        evidence: a sentence.
        look: what to look at in the code, a sentence.
        factor: by which the values of the candidate are too large, if that is the cause.
    """

    name: str
    evidence: str
    look: str
    factor: float | None = None


@dataclass(frozen=True)
class Result:
    """What a comparison of two runs found.

    Attributes:
        differences: all places, in the order in which a step comes to them.
        cause: of the first one; None if the runs are alike.
        notes: what could not be compared, in sentences.
        compared: how many outputs, gradients and so on were compared.
        order: the modules in the order of the forward.
    """

    differences: Sequence[Difference]
    cause: Cause | None
    notes: Sequence[str] = ()
    compared: dict[str, int] = field(default_factory=dict)
    order: Sequence[str] = ()

    @property
    def alike(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        return next(iter(self.differences), None)

    def to_json(self) -> dict[str, Any]:
        """The keys of `pipeflow check --json`."""
        first, cause = self.first, self.cause
        place = None
        if first is not None:
            place = {
                "step": first.step,
                "what": first.what,
                "module": first.module,
                "parameter": first.parameter,
                "stage": first.stage,
                "rank": first.ranks[0] if first.ranks else None,
            }
        return {
            "alike": self.alike,
            "first": place,
            "cause": None if cause is None else cause.name,
            "factor": None if cause is None else cause.factor,
            "evidence": None if cause is None else cause.evidence,
            "look": None if cause is None else cause.look,
            "notes": list(self.notes),
        }
