"""The page of a comparison: the model as a tree, with where it begins to differ. It runs no script."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from html import escape

from pipeflow.checking.findings import Difference, Result
from pipeflow.checking.telling import paragraph, place

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
        for step in name.split("."):
            here = here.setdefault(step, {})  # type: ignore[assignment]  # a tree of trees
    first = result.first
    top = "" if first is None or first.module else f"<p class=first>{escape(place(first))}</p>"
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    verdict, alike = escape(paragraph(result)), " alike" * result.alike
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
        f"<title>{'alike' if result.alike else 'different'}: {escape(candidate)}</title>\n<style>{STYLE}</style>\n"
        "</head>\n"
        f"<body>\n<h1><code>{escape(candidate)}</code> against <code>{escape(reference)}</code></h1>\n"
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
        why = "".join(f"<span class=why>{escape(_short(each))}</span>" for each in mine[:3])
        label = f"<code>{escape(step)}</code>{why}"
        if inside:
            below = _tree(inside, name, wrong, first)  # type: ignore[arg-type]  # a tree of trees
            is_open = " open" if any_inside or above.count(".") < 1 else ""
            items.append(f"<li><details{is_open}><summary class='{classes}'>{label}</summary>{below}</details></li>")
        else:
            items.append(f"<li class='leaf {classes}'>{label}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _short(each: Difference) -> str:
    what = each.parameter.rpartition(".")[2] or each.what
    kind = f"{each.what} of {what}" if each.parameter else each.what
    return f"{kind}: {each.error:.2g} off"
