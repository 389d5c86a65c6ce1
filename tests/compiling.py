"""What tests of compiled stages share: their marks. The fixture `fresh_compiler` is in `conftest.py`."""

from __future__ import annotations

import pytest

COMPILED = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # torch hides it on one thread
]
"""Of tests that call torch.compile."""
