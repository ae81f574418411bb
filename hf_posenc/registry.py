"""Name -> thing tables that fill themselves from a folder, so that adding one thing edits one file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Generic, TypeVar

from hf_posenc.errors import ConfigError, UnknownNameError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name.

    Args:
        kind: what the things are called in error messages, for example `"encoding"`.
        package: the package whose modules register themselves when imported; they are imported at the first
            look-up, not before.
    """

    def __init__(self, *, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._things: dict[str, T] = {}
        self._scanned = False

    def add(self, name: str, thing: T) -> T:
        """Register `thing` under `name` and return it.

        Raises:
            ConfigError: something else holds that name already.
        """
        if name in self._things and self._things[name] != thing:
            raise ConfigError(f"{self.kind} {name!r} is registered already; choose another name.")
        self._things[name] = thing
        return thing

    def __getitem__(self, name: str) -> T:
        """Return the thing called `name`; raises UnknownNameError with the closest name otherwise."""
        self._scan()
        if name not in self._things:
            raise UnknownNameError(f"unknown {self.kind} {name!r}; {did_you_mean(str(name), self._things)}")
        return self._things[name]

    def __contains__(self, name: object) -> bool:
        """Tell whether `name` is registered."""
        self._scan()
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in alphabetical order."""
        self._scan()
        return iter(sorted(self._things))

    def values(self) -> list[T]:
        """Return the things in the order of their names."""
        return [self._things[name] for name in self]

    def close(self) -> None:
        """Look for no more modules: what is registered is all there is, as in the code beside a saved model."""
        self._scanned = True

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True  # first: the modules below look names up while they register
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, prefix=f"{self.package}."):
            importlib.import_module(module.name)
