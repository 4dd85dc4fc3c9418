"""kernels.h as ctypes has it: the enumerations, structures and functions that C++ declares are read from there."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

Int64, Pointer = ctypes.c_int64, ctypes.c_void_p

_NUMBERS: dict[str, Any] = {"std::int64_t": Int64, "float": ctypes.c_float, "int": ctypes.c_int}
_TEXT = re.sub(r"//.*", "", Path(__file__).with_name("kernels.h").read_text(encoding="utf-8"))
# Enumeration -> its names -> their numbers.
ENUMS: dict[str, dict[str, int]] = {
    name: {each.strip(): number for number, each in enumerate(names.split(","))}
    for name, names in re.findall(r"^enum class (\w+) : std::int64_t \{([^}]*)\};", _TEXT, re.MULTILINE)
}
_NUMBERS |= dict.fromkeys(ENUMS, Int64)


def _declared(statement: str) -> list[tuple[str, Any]]:
    """Names and types of a declaration: ``const float *a, *b`` are two. A pointer to a structure has the type of one;
    any other takes an address or an array."""
    kind, rest = re.sub(r"\b(const|struct)\b", "", statement).split(None, 1)
    found: list[tuple[str, Any]] = []
    for each in rest.split(","):
        stars, name = each.count("*"), each.replace("*", "").strip()
        if stars == 1 and kind in STRUCTURES:
            found.append((name, ctypes.POINTER(STRUCTURES[kind])))
        else:
            found.append((name, Pointer if stars else _NUMBERS.get(kind) or STRUCTURES[kind]))
    return found


STRUCTURES: dict[str, type[ctypes.Structure]] = {}
for _name, _body in re.findall(r"^struct (\w+) \{(.*?)^\};", _TEXT, re.DOTALL | re.MULTILINE):
    _fields = [field for statement in _body.split(";")[:-1] for field in _declared(statement)]
    STRUCTURES[_name] = type(_name, (ctypes.Structure,), {"_fields_": _fields})

# Function, without the ``longdraft_`` of its name -> the types of its arguments, of those that return a Code.
FUNCTIONS: dict[str, list[Any]] = {
    name: [kind for argument in arguments.split(",") for _, kind in _declared(argument)]
    for name, arguments in re.findall(r"^Code longdraft_(\w+)\(([^()]*)\);", _TEXT, re.MULTILINE)
}
