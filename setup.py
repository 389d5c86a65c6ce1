"""What `pyproject.toml` cannot say: a wheel has stubs of the short paths, such as `pipeflow.lightning.fabric` for
`pipeflow.adapters.lightning.fabric`, because type checkers only know modules that are files.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHORT_PATH = re.compile(r'stand_for\(__name__, "pipeflow\.([\w.]+)"\)')


class BuildWithStubs(build_py):
    """Copies the package, then writes the stubs beside it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        root = Path(self.build_lib, "pipeflow")
        for short in root.glob("*.py"):
            for long in SHORT_PATH.findall(short.read_text(encoding="utf-8")):
                package = root.joinpath(*long.split("."))
                for module in package.rglob("*.py"):
                    stub = short.with_suffix("") / module.relative_to(package).with_suffix(".pyi")
                    stub.parent.mkdir(parents=True, exist_ok=True)
                    name = ".".join(module.relative_to(root.parent).with_suffix("").parts)
                    stub.write_text(f"from {name.removesuffix('.__init__')} import *\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildWithStubs})
