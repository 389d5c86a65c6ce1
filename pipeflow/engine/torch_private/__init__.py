"""The private names of torch that pipeflow uses, in one place: torch may rename or remove each of them in any release.
Other packages import them from here under plain names. `attributes` lists private attributes of torch's objects, which
are used where they are needed. `tests/test_torch_private.py` tests each name. Must not contain: anything of pipeflow's.
"""

from __future__ import annotations

import locale
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def needed() -> Iterator[None]:
    """Inside, private names are looked up. Raises ImportError that says which name this torch has not,
    or that it cannot read its own files.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} lacks a private name that pipeflow needs: {error}. Install a torch that "
            "pipeflow was tested with: 2.10 to 2.15"
        ) from error
    except UnicodeDecodeError as error:
        raise ImportError(
            f"torch reads its own files in the encoding of the locale, {locale.getencoding()}: set PYTHONUTF8=1"
        ) from error
