"""Models of other libraries: each equals the plain module, or is refused by an error that names a submodule."""

from __future__ import annotations

import re

import pytest

from tests.stages.others.form import Form
from tests.stages.others.forms import FORMS
from tests.stages.others.outcome import outcomes
from tests.stages.others.table import PAGE, rows_in


def test_rows_of_the_page_are_of_forms_that_are_right_or_refused() -> None:
    titles, rows = [form.title for form in FORMS], rows_in(PAGE.read_text(encoding="utf-8"))
    assert len(titles) == len(set(titles))
    assert list(rows) == [title for title in titles if title in rows], "make others writes them anew"
    for row in rows.values():
        assert not re.search(r"\| (wrong|error) \|", row)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.title)
def test_form(form: Form) -> None:
    pytest.importorskip(form.library.partition(".")[0], reason="not installed", exc_type=ImportError)
    found = outcomes(form)
    names = [name for name, _ in form.made().named_modules() if name]
    for name, outcome in found.items():
        assert outcome.kind in ("right", "refused", "-"), f"{name}: {outcome.said}"
        if outcome.kind == "refused":
            assert any(each in outcome.said for each in names), outcome.said
