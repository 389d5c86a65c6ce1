"""bundle: joins ES modules into one script, for a page that is a single file and loads nothing. The modules also work
unchanged where they are served as files.
"""

from __future__ import annotations

import re
from collections.abc import Callable

IMPORT = re.compile(r'^import \{([\w, ]+)\} from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:const|function|class) (\w+))", re.MULTILINE)


def bundle(entry: str, read: Callable[[str], str]) -> str:
    r"""The module `entry` and the modules that it imports, each in a function of its own, after those that it needs.

    `read` returns the text of a module by its name. Modules import names from modules beside them, in one line, and
    export constants, functions and classes.

    >>> modules = {"one": "export const x = 1;", "two": 'import {x} from "./one.js";\nalert(x);'}
    >>> print(bundle("two", modules.__getitem__))
    "use strict";
    const modules = {};
    modules.one = (() => {
    const x = 1;
    return {x};
    })();
    modules.two = (() => {
    const {x} = modules.one;
    alert(x);
    return {};
    })();
    """
    wrapped: dict[str, str] = {}

    def add(name: str) -> None:
        text = read(name)
        for _, needed in IMPORT.findall(text):
            if needed not in wrapped:
                add(needed)
        wrapped[name] = _wrapped(name, text)

    add(entry)
    return "\n".join(['"use strict";\nconst modules = {};', *wrapped.values()])


def _wrapped(name: str, text: str) -> str:
    """A module as a function that runs once and returns its exports."""
    exports = ", ".join(EXPORT.findall(text))
    body = EXPORT.sub("", IMPORT.sub(r"const {\1} = modules.\2;", text))
    return f"modules.{name} = (() => {{\n{body.rstrip()}\nreturn {{{exports}}};\n}})();"
