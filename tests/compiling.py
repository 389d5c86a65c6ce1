"""What tests of compiled stages share: their marks. The fixture `fresh_compiler` is in `conftest.py`."""

from __future__ import annotations

import locale

import pytest

READS_UTF8 = pytest.mark.skipif(
    locale.getencoding().lower() not in ("utf-8", "utf8"),
    reason="torch.compile reads files of torch in the encoding of the locale, and they are UTF-8",
)
COMPILED = [
    READS_UTF8,
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # torch hides it on one thread
]
"""Of tests that call torch.compile."""
