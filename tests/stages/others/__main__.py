"""Runs all forms, or those whose title contains one of the words given, and writes their rows of docs/others.md:
`make others`, which installs the libraries. With --missing, runs only those without a row.
"""

from __future__ import annotations

import sys
import time
import warnings
from datetime import date
from importlib.metadata import version

from tests.stages.others.forms import FORMS
from tests.stages.others.outcome import outcomes
from tests.stages.others.table import PAGE, row, rows_in, written

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    words = [word for word in sys.argv[1:] if word != "--missing"]
    for form in FORMS:
        is_done = "--missing" in sys.argv and form.title in rows_in(PAGE.read_text(encoding="utf-8"))
        if not is_done and (not words or any(word in form.title for word in words)):
            start = time.perf_counter()
            found = outcomes(form)
            line = row(form, found, version(form.package), date.today().isoformat())
            print(f"{form.package}: {line}\n  {time.perf_counter() - start:.1f} s", flush=True)  # noqa: T201
            page = PAGE.read_text(encoding="utf-8")
            known = {**rows_in(page), form.title: line}
            PAGE.write_text(
                written(page, FORMS, {each.title: known[each.title] for each in FORMS if each.title in known}),
                encoding="utf-8",
            )
