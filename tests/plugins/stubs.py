"""Modules that SGLang imports by name and that are compiled for GPUs: stubs in which every name exists."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable

STUBBED = ("sgl_kernel", "torchvision")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Put it on ``sys.meta_path``. ``member``: (module, name) -> what the module has by that name."""

    def __init__(self, member: Callable[[str, str], object]) -> None:
        self._member = member

    def find_spec(self, name, path, target=None):
        del path, target
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STUBBED else None

    def create_module(self, spec):
        member = self._member

        class Stub(types.ModuleType):
            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return member(self.__name__, name)

        return Stub(spec.name)

    def exec_module(self, module):
        pass
