"""Findings: where two runs differ and why, as values, as a paragraph for the terminal, and as a page with the model as
a tree, which runs no script. Must not contain: how it is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeVar

from pipeflow.core.text import printable

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
    "formula",
    "detached",
    "optimizer",
    "unknown",
)


@dataclass(frozen=True)
class Difference:
    """A place where two runs differ by more than rounding.

    Attributes:
        step: index of the step.
        what: "batch", "weight", "buffer", "output", "function", "input", "scalar", "loss", "gradient", "norm",
            "optimizer" or "update".
        module, parameter: names in the reference; "" if it is none. That of a function is "MODULE: FUNCTION #1".
        stage: the pipeline stage of the candidate that has it; None if it has no stages.
        ranks: the ranks of the candidate that have it.
        error: how far the runs are apart, relative to the reference.
        allowed: how far rounding explains.
        partial: of an output: the ranks' outputs add up to that of the reference.
        lacking: of an output or batch: no rank has some rows of the reference.
        after: of a function or input: the last output before it that is right.
        where: of a function or input: the file and line of the candidate's code.
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
    after: str = ""
    where: str = ""


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


Evidence = str | tuple[str, float] | Cause | None  # in words, with the factor if there is one; or another cause
Method = TypeVar("Method", bound=Callable[[Any], Evidence])


def explains(cause: str, look: str) -> Callable[[Method], Method]:
    """A decorator of methods that return evidence of a cause, if there is any.

    Args:
        cause: its name.
        look: what to look at in the code, with attributes of the object in braces.
    """

    def marked(method: Method) -> Method:
        method.explains = cause, look  # type: ignore[attr-defined]  # for `explained`
        return method

    return marked


def explained(case: object) -> Cause | None:
    """The first cause of which there is evidence: methods are tried in the order in which their class has them."""
    for method in vars(type(case)).values():
        if (known := getattr(method, "explains", None)) is None or (evidence := method(case)) is None:
            continue
        if isinstance(evidence, Cause):
            return evidence
        text, factor = (evidence, None) if isinstance(evidence, str) else (evidence[0], round(evidence[1], 6))
        return Cause(known[0], text, known[1].format(self=case), factor)
    return None


@dataclass(frozen=True)
class Result:
    """What a comparison of two runs found.

    Attributes:
        differences: all places, in the order in which a step comes to them.
        cause: of the first one; None if the runs are alike.
        notes: what could not be compared, in sentences.
        compared: how many outputs, gradients and so on were compared.
        order: the modules in the order of the forward.
        left_out: how many weights and buffers of the reference could not be compared.
    """

    differences: Sequence[Difference]
    cause: Cause | None
    notes: Sequence[str] = ()
    compared: dict[str, int] = field(default_factory=dict)
    order: Sequence[str] = ()
    left_out: int = 0

    @property
    def alike(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        return next(iter(self.differences), None)

    def to_json(self) -> dict[str, Any]:
        """The keys of `pipeflow check --json`."""
        first, place = self.first, None
        if first is not None:
            place = {name: getattr(first, name) for name in ("step", "what", "module", "parameter", "stage")}
            place["rank"] = next(iter(first.ranks), None)
        why = {name: getattr(self.cause, name, None) for name in ("name", "factor", "evidence", "look")}
        notes = {"notes": list(self.notes), "left_out": self.left_out}
        return {"alike": self.alike, "first": place, "cause": why.pop("name"), **why, **notes}


WHAT = {
    "batch": "the batches",
    "weight": "the initial values of",
    "buffer": "the buffer",
    "output": "the output of",
    "function": "the result of",
    "input": "what is computed between the output of",
    "scalar": "a number that is given or returned by",
    "loss": "the loss",
    "gradient": "the gradient of",
    "norm": "the norm of the gradients",
    "optimizer": "the optimizer's numbers for",
    "update": "the new values of",
}


def paragraph(result: Result) -> str:
    """One paragraph: whether the runs differ, since where and why, the evidence, and what to look at."""
    if result.first is None:
        found = {what: f"{count} {what}" for what, count in result.compared.items() if count}
        if result.left_out:
            compared = result.compared.get("weights", 0)
            found["weights"] = f"{compared} of {compared + result.left_out} weights"
        counts = [*found.values()]
        listed = f"{', '.join(counts[:-1])} and {counts[-1]}" if len(counts) > 1 else "".join(counts)
        alike = "alike in what was compared" if result.left_out else "alike"
        return f"The runs are {alike}: {listed} differ by no more than rounding."
    first, cause = result.first, result.cause
    assert cause is not None
    why = "the cause is unknown" if cause.name == "unknown" else f"the likely cause is {cause.name}"
    told = ". ".join(each[:1].upper() + each[1:] for each in (place(first), cause.evidence))
    return f"The runs differ from step {first.step} on, and {why}. {told}. Look at {cause.look}."


def place(first: Difference) -> str:
    """Where a difference is, and how large."""
    name = first.parameter or first.module
    if not name.partition(": ")[0] and first.what in ("output", "function", "input", "scalar"):
        name = f"the whole model{name}"
    if first.what == "input":
        name = f"{first.after or 'the model before'} and the input of {name}"
    what = WHAT[first.what] + (f" {name}" if first.what not in ("batch", "loss", "norm") else "")
    stage = f"stage {first.stage}, " if first.stage is not None else ""
    listed = ", ".join(map(str, first.ranks[:8]))
    code = f"{first.where}; " if first.where else ""
    where = f" ({code}{stage}rank{'s' if len(first.ranks) > 1 else ''} {listed})" if first.ranks else ""
    verb = "are" if first.what in ("batch", "weight", "optimizer", "update") else "is"
    size = "the terms that it adds up" if first.what == "gradient" else "the reference"
    return (
        f"{what}{where} {verb} the first to differ, by {first.error:.2g} of {size}, where "
        f"rounding explains {first.allowed:.1g}"
    )


def others(result: Result, most: int = 3) -> Iterator[str]:
    """What else differs, by kind."""
    counts: dict[str, int] = {}
    for each in result.differences[1:]:
        counts[each.what] = counts.get(each.what, 0) + 1
    if counts:
        yield "after it: " + ", ".join(f"{count} of {what}" for what, count in [*counts.items()][:most])


MOST_DEEP = 100  # modules within each other that the page shows so; the names of deeper ones are not divided further

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --soft: #666666; --line: #d0d0d0; --bad: #b3261e;
  --mark: #fde7e5; --good: #1b6e3c; }
@media (prefers-color-scheme: dark) { :root { --ink: #eaeaea; --paper: #16181a; --soft: #a5a5a5; --line: #3a3d40;
  --bad: #ff8a80; --mark: #3a1f1d; --good: #7fd6a0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-size: 1.2rem; }
.verdict { border-left: 4px solid var(--bad); padding: .3rem 0 .3rem .8rem; }
.verdict.alike { border-color: var(--good); }
ul { list-style: none; margin: 0; padding-left: 1.2rem; border-left: 1px solid var(--line); }
summary, .leaf { padding: .05rem .3rem; }
summary { cursor: pointer; }
code { font: 13px ui-monospace, monospace; }
.wrong > code, summary.wrong code { color: var(--bad); font-weight: 600; }
.first { background: var(--mark); outline: 2px solid var(--bad); border-radius: 3px; }
.why { color: var(--soft); font-size: 13px; margin-left: .6rem; }
.notes { color: var(--soft); }
"""


def page(result: Result, reference: str, candidate: str) -> str:
    """The page, as a text; `reference` and `candidate` name the recordings."""
    wrong: defaultdict[str, list[Difference]] = defaultdict(list)
    for each in result.differences:
        wrong[each.module].append(each)
    names = [name for name in dict.fromkeys([*result.order, *wrong]) if name]
    tree: dict[str, dict[str, object]] = {}
    for name in names:
        here: dict[str, object] = tree  # type: ignore[assignment]  # a tree of trees
        for step in name.split(".", MOST_DEEP):
            here = here.setdefault(step, {})  # type: ignore[assignment]  # a tree of trees
    first = result.first
    top = "" if first is None or first.module else f"<p class=first>{_shown(place(first))}</p>"
    notes = "".join(f"<li>{_shown(note)}</li>" for note in result.notes)
    verdict, alike = _shown(paragraph(result)), " alike" * result.alike
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
        f"<title>{'alike' if result.alike else 'different'}: {_shown(candidate)}</title>\n<style>{STYLE}</style>\n"
        "</head>\n"
        f"<body>\n<h1><code>{_shown(candidate)}</code> against <code>{_shown(reference)}</code></h1>\n"
        f"<p class='verdict{alike}'>{verdict}</p>\n{top}"
        "<h2>The model</h2>\n<p class=notes>Modules whose outputs, weights or gradients differ are marked; the first "
        f"is framed.</p>\n{_tree(tree, '', wrong, first)}\n<ul class=notes>{notes}</ul>\n</body>\n</html>\n"
    )


def _tree(
    tree: Mapping[str, Mapping[str, object]],
    above: str,
    wrong: Mapping[str, list[Difference]],
    first: Difference | None,
) -> str:
    items = []
    for step, inside in tree.items():
        name = f"{above}.{step}" if above else step
        mine = wrong.get(name, [])
        any_inside = any(each == name or each.startswith(f"{name}.") for each in wrong)
        classes = " ".join(["wrong"] * bool(mine) + ["first"] * (first is not None and first.module == name))
        why = "".join(f"<span class=why>{_shown(_short(each))}</span>" for each in mine[:3])
        label = f"<code>{_shown(step)}</code>{why}"
        if inside:
            below = _tree(inside, name, wrong, first)  # type: ignore[arg-type]  # a tree of trees
            is_open = " open" if any_inside or above.count(".") < 1 else ""
            items.append(f"<li><details{is_open}><summary class='{classes}'>{label}</summary>{below}</details></li>")
        else:
            items.append(f"<li class='leaf {classes}'>{label}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _shown(text: str) -> str:
    """A text of a recording as HTML shows it, with control characters and lone surrogates written out."""
    return escape(printable(text))


def _short(each: Difference) -> str:
    what = each.parameter.rpartition(".")[2] or each.what
    kind = f"{each.what} of {what}" if each.parameter else each.what
    return f"{kind}: {each.error:.2g} off"
