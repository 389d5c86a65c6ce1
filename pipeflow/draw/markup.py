"""Markup: text made safe for HTML and XML."""

from __future__ import annotations

import re
from html import escape


def escaped(text: str) -> str:
    """The text, escaped for an element or an attribute of HTML or XML. Characters that these cannot hold are replaced.

    >>> escaped("<b> & c")
    '&lt;b&gt; &amp; c'
    """
    return escape(_UNWRITABLE.sub("\ufffd", text))


_UNWRITABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
