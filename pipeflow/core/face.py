"""Module paths that are no files. Face: a package with the module paths of another library, so that its scripts find
their names where they expect them. The modules exist in a table alone, which says where each of their names is defined;
Python makes them when they are imported. Definitions are in ordinary files of the package, which never import modules
of the table. `stand_for`: a short path for a package that lies deeper.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

from pipeflow.core.errors import nearest


class Name(NamedTuple):
    """The name `alias` of a module, for what the module `source` calls `name`."""

    source: str
    name: str
    alias: str


class Face(MetaPathFinder, Loader):
    """Finds and makes the modules of a table.

    Args:
        package: full name of the package, whose `__init__` calls `install`.
        file: the file with the table.
        names: by the path of a module in the package ("" is the package itself) and by the module that defines them,
            the names that it has, as in an import statement: "A, B as C". The defining module is one of the package, or
            has its full name. A package of such modules needs no entry of its own.
        instead: names and modules of the other library that the package does not have, by their paths, each with what
            to use instead, as in "lazy" or "nn.lr_scheduler.StepLR".
    """

    def __init__(
        self, package: str, file: str, names: Mapping[str, Mapping[str, str]], instead: Mapping[str, str]
    ) -> None:
        self.package = package
        self.file = file
        self.instead = instead
        self._names = {
            path: [name for each in entry.items() for name in self._read(*each)] for path, entry in names.items()
        }
        self._modules = _with_packages(names)

    def _read(self, source: str, names: str) -> list[Name]:
        known = source.startswith(f"{self.package.partition('.')[0]}.")
        pairs = (name.partition(" as ")[::2] for name in names.split(", "))
        return [Name(source if known else self.full(source), name, alias or name) for name, alias in pairs]

    def full(self, path: str) -> str:
        """Returns the full name of the module with this path in the package."""
        return f"{self.package}.{path}".rstrip(".")

    def modules(self) -> list[str]:
        """Returns the paths of the other library's modules, in alphabetical order."""
        return sorted(self._modules)

    def submodules(self, path: str) -> list[str]:
        """Returns the names of the modules in a package of the table."""
        start = f"{path}.".lstrip(".")
        inside = (each.removeprefix(start) for each in self.modules() if each.startswith(start))
        return [name for name in inside if name and "." not in name]

    def names(self, path: str) -> Sequence[Name]:
        """Returns the names that the table gives to a module."""
        return self._names.get(path, ())

    def public(self, path: str) -> list[str]:
        """Returns the names of a module that `import *` imports, in alphabetical order."""
        return sorted(each.alias for each in self.names(path) if not each.alias.startswith("_"))

    def install(self) -> None:
        """Lets Python find the modules, and gives the package its own names."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # before the finder of files, which takes folders of stubs for packages
        self.exec_module(sys.modules[self.package])

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Finds a module of the table or a file of the package; returns None for other packages. Python also calls it
        for `from MODULE import NAME` if the module does not have the name.

        Raises ModuleNotFoundError if there is none, with what to use instead, or with the nearest name.
        """
        parent, _, name = fullname.rpartition(".")
        if not f"{parent}.".startswith(f"{self.package}."):
            return None
        if self._path(fullname) in self._modules:
            spec = ModuleSpec(fullname, self, origin=self.file, is_package=True)
            spec.has_location = True
            return spec
        found = PathFinder.find_spec(fullname, path)
        if found is None and not name.startswith("__"):
            raise ModuleNotFoundError(self._missing(parent, name))
        return found

    def _missing(self, parent: str, name: str) -> str:
        path = self._path(parent)
        instead = self.instead.get(f"{path}.{name}".lstrip("."))
        known = sorted({*self.public(path), *self.submodules(path)})
        return f"{parent} has no {name!r}; {nearest(name, known) if instead is None else f'use {instead}'}"

    def exec_module(self, module: ModuleType) -> None:
        """Imports the names of a module, which then also has its submodules, imported when they are first used."""
        path = self._path(module.__name__)
        vars(module)["__getattr__"] = partial(self._submodule, path)
        for source, name, alias in self.names(path):
            setattr(module, alias, getattr(import_module(source), name))
        vars(module)["__all__"] = self.public(path)
        if module.__doc__ is None:
            sources = dict.fromkeys(each.source for each in self.names(path))
            module.__doc__ = f"Names that are defined in {', '.join(sources) or 'its submodules'}."

    def _submodule(self, path: str, name: str) -> Any:
        """A submodule; raises AttributeError if there is none."""
        if (inner := f"{path}.{name}".lstrip(".")) in self._modules:
            return import_module(self.full(inner))
        module = sys.modules[self.full(path)]
        raise AttributeError(self._missing(self.full(path), name), name=name, obj=module)

    def _path(self, fullname: str) -> str:
        return fullname.removeprefix(self.package).lstrip(".")


def _with_packages(paths: Iterable[str]) -> set[str]:
    """The paths and those of the packages around them.

    >>> sorted(_with_packages(["core.models.gpt", ""]))
    ['', 'core', 'core.models', 'core.models.gpt']
    """
    steps = [path.split(".") for path in paths]
    return {".".join(each[:length]) for each in steps for length in range(1, len(each) + 1)} | {""}


class _ShortPaths(MetaPathFinder, Loader):
    """Finds the modules below a short path: each is the module at the long path, not a second copy of it."""

    def __init__(self) -> None:
        self.long: dict[str, str] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if any(fullname.startswith(f"{short}.") for short in self.long) else None

    def exec_module(self, module: ModuleType) -> None:
        short = next(each for each in self.long if module.__name__.startswith(f"{each}."))
        full = self.long[short] + module.__name__.removeprefix(short)
        sys.modules[module.__name__] = import_module(full)  # Python takes what it then finds there


_SHORT_PATHS = _ShortPaths()


def stand_for(short: str, long: str) -> None:
    """Makes the path `short` of a module that is being imported another name of the package `long`, and of all modules
    in it.
    """
    if _SHORT_PATHS not in sys.meta_path:
        sys.meta_path.insert(0, _SHORT_PATHS)
    _SHORT_PATHS.long[short] = long
    standing, found = sys.modules[short], import_module(long)
    sys.modules[short] = found
    vars(standing)["__getattr__"] = partial(getattr, found)  # another thread that imports it meanwhile got this one
