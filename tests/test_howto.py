"""Each how-to page works when it is followed to the letter, in a copy of the package and its tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import pipeflow
from tests.howto import change, follow

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    for folder in (Path(pipeflow.__file__).parent, ROOT / "tests"):
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    follow(page.read_text(encoding="utf-8"), tmp_path)


def test_a_change_of_lines_that_are_not_there_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("a\nb\nc\n", encoding="utf-8")
    change(file, "@@\n a\n-b\n+d\n@@ again\n c\n+e\n")
    assert file.read_text(encoding="utf-8") == "a\nd\nc\ne\n"
    with pytest.raises(AssertionError, match=r"file\.py has not once:\na\nb\n"):
        change(file, "@@\n a\n-b\n")
