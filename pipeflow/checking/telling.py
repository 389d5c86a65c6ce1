"""Telling what a comparison found: a paragraph for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.checking.findings import Difference, Result

WHAT = {
    "batch": "the batches",
    "weight": "the initial values of",
    "buffer": "the buffer",
    "output": "the output of",
    "loss": "the loss",
    "gradient": "the gradient of",
    "norm": "the norm of the gradients",
    "update": "the new values of",
}


def paragraph(result: Result) -> str:
    """One paragraph: where the runs begin to differ, why, the evidence, and what to look at."""
    if result.first is None:
        counts = [f"{count} {what}" for what, count in result.compared.items() if count]
        listed = f"{', '.join(counts[:-1])} and {counts[-1]}" if len(counts) > 1 else "".join(counts)
        return f"alike: {listed} differ by no more than rounding."
    first, cause = result.first, result.cause
    assert cause is not None
    evidence = cause.evidence[:1].upper() + cause.evidence[1:]
    return f"different: {place(first)}. Cause: {cause.name}. {evidence}. Look at {cause.look}."


def place(first: Difference) -> str:
    """Where a difference is, and how large."""
    name = first.parameter or first.module
    what = WHAT[first.what] + (f" {name}" if first.what not in ("batch", "loss", "norm") else "")
    stage = f"stage {first.stage}, " if first.stage is not None else ""
    listed = ", ".join(map(str, first.ranks[:8]))
    where = f" ({stage}rank{'s' if len(first.ranks) > 1 else ''} {listed})" if first.ranks else ""
    verb = "are" if first.what in ("batch", "weight", "update") else "is"
    size = "the terms that it adds up" if first.what == "gradient" else "the reference"
    return (
        f"in step {first.step}, {what}{where} {verb} the first to differ, by {first.error:.2g} of {size}, where "
        f"rounding explains {first.allowed:.1g}"
    )


def others(result: Result, most: int = 3) -> Iterator[str]:
    """What else differs, by kind."""
    counts: dict[str, int] = {}
    for each in result.differences[1:]:
        counts[each.what] = counts.get(each.what, 0) + 1
    if counts:
        yield "after it: " + ", ".join(f"{count} of {what}" for what, count in [*counts.items()][:most])
