"""Parses kernels.h into constants and ctypes types: enumerations, structures and functions."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

Int64, Pointer = ctypes.c_int64, ctypes.c_void_p

_SCALARS: dict[str, Any] = {"std::int64_t": Int64, "float": ctypes.c_float, "int": ctypes.c_int}
_SOURCE = re.sub(r"//.*", "", Path(__file__).with_name("kernels.h").read_text(encoding="utf-8"))
# Name of an enumeration -> {name of a member: its number}.
ENUMS: dict[str, dict[str, int]] = {
    name: {member.strip(): number for number, member in enumerate(names.split(","))}
    for name, names in re.findall(r"^enum class (\w+) : std::int64_t \{([^}]*)\};", _SOURCE, re.MULTILINE)
}
_SCALARS |= dict.fromkeys(ENUMS, Int64)
# Name of an integer constant -> its value.
CONSTANTS = {
    name: int(value) for name, value in re.findall(r"^constexpr std::int64_t (\w+) = (\d+);", _SOURCE, re.MULTILINE)
}
# Names of the members of Status, which functions return by number.
STATUSES = tuple(re.findall(r"\w+", re.findall(r"Status : int \{([^}]*)\};", _SOURCE)[0]))


def _parse_declaration(statement: str) -> list[tuple[str, Any]]:
    """Parses a declaration such as ``const float *a, *b`` into [(name, ctype)]. Pointers to structures are typed; all
    others are void pointers, which accept addresses and arrays."""
    type_name, rest = re.sub(r"\b(const|struct)\b", "", statement).split(None, 1)
    declared: list[tuple[str, Any]] = []
    for declarator in rest.split(","):
        stars, name = declarator.count("*"), declarator.replace("*", "").strip()
        if stars == 1 and type_name in STRUCTURES:
            declared.append((name, ctypes.POINTER(STRUCTURES[type_name])))
        else:
            declared.append((name, Pointer if stars else _SCALARS.get(type_name) or STRUCTURES[type_name]))
    return declared


# Name of a structure -> its ctypes class.
STRUCTURES: dict[str, type[ctypes.Structure]] = {}
for _name, _body in re.findall(r"^struct (\w+) \{(.*?)^\};", _SOURCE, re.DOTALL | re.MULTILINE):
    _fields = [field for statement in _body.split(";")[:-1] for field in _parse_declaration(statement)]
    STRUCTURES[_name] = type(_name, (ctypes.Structure,), {"_fields_": _fields})

# Name of a function that returns a Status, without the prefix ``longdraft_`` -> types of its arguments.
FUNCTIONS: dict[str, list[Any]] = {
    name: [ctype for argument in arguments.split(",") for _, ctype in _parse_declaration(argument)]
    for name, arguments in re.findall(r"^Status longdraft_(\w+)\(([^()]*)\);", _SOURCE, re.MULTILINE)
}
