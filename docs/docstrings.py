"""For the API reference: a class that says `__doc__ = Base.__doc__` has the docstring of that base."""

from __future__ import annotations

from typing import Any

import griffe


class SharedDocstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._share(pkg)

    def _share(self, parent: griffe.Module | griffe.Class) -> None:
        for member in list(parent.members.values()):
            if member.is_alias or not (member.is_module or member.is_class):
                continue
            self._share(member)
            if member.is_class and "__doc__" in member.members:
                base = str(member.members["__doc__"].value).removesuffix(".__doc__")
                member.docstring = member.module.modules_collection[member.resolve(base)].docstring
