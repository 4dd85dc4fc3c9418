"""Parses formats.h and kernels.h into constants and ctypes types: formats, enumerations, structures and functions."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, NamedTuple

Int64, Pointer = ctypes.c_int64, ctypes.c_void_p

_SCALARS: dict[str, Any] = {
    "std::int64_t": Int64, "std::int32_t": ctypes.c_int32, "std::uint8_t": ctypes.c_uint8, "float": ctypes.c_float,
    "int": ctypes.c_int,
}  # fmt: skip
_FILES = (Path(__file__).with_name(name) for name in ("formats.h", "kernels.h"))
_SOURCE = "".join(re.sub(r"//.*", "", file.read_text(encoding="utf-8")) for file in _FILES)


class QuantFormat(NamedTuple):
    """The first numbers of a row of QUANT_FORMATS, which has all of them."""

    block_weights: int
    block_bytes: int
    act_weights: int


# Name of a format of quant blocks -> its numbers.
QUANT_FORMATS = {
    name: QuantFormat(*map(int, numbers))
    for name, *numbers in re.findall(r"\bROW\((\w+), +(\d+), +(\d+), +(\d+),", _SOURCE)
}
_SOURCE = _SOURCE.replace("QUANT_FORMATS(FORMAT_NAME)", "".join(f"{name}, " for name in QUANT_FORMATS))
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


def _parse_declarations(statement: str) -> list[tuple[str, Any, Any]]:
    """Parses a statement such as ``const float *a, *b`` into [(name, ctype, type of what a pointer points to or None)].

    Pointers to structures are typed; all others are void pointers, which accept addresses and arrays.
    """
    type_name, rest = re.sub(r"\b(const|struct)\b", "", statement).split(None, 1)
    declared: list[tuple[str, Any, Any]] = []
    for declarator in rest.split(","):
        stars, name = declarator.count("*"), declarator.replace("*", "").strip()
        if stars == 1 and type_name in STRUCTURES:
            declared.append((name, ctypes.POINTER(STRUCTURES[type_name]), STRUCTURES[type_name]))
        elif stars:
            declared.append((name, Pointer, _SCALARS.get(type_name) if stars == 1 else Pointer))
        else:
            declared.append((name, _SCALARS.get(type_name) or STRUCTURES[type_name], None))
    return declared


# Name of a structure -> its ctypes class.
STRUCTURES: dict[str, type[ctypes.Structure]] = {}
# Name of a structure -> {name of a field: type of what it points to, or None}.
ELEMENTS: dict[str, dict[str, Any]] = {}
for _name, _body in re.findall(r"^struct (\w+) \{(.*?)^\};", _SOURCE, re.DOTALL | re.MULTILINE):
    _fields = [field for statement in _body.split(";")[:-1] for field in _parse_declarations(statement)]
    STRUCTURES[_name] = type(_name, (ctypes.Structure,), {"_fields_": [field[:2] for field in _fields]})
    ELEMENTS[_name] = {name: element for name, _, element in _fields}

# Name of a function that returns a Status, without the prefix ``longdraft_`` -> types of its arguments.
FUNCTIONS: dict[str, list[Any]] = {
    name: [ctype for argument in arguments.split(",") for _, ctype, _ in _parse_declarations(argument)]
    for name, arguments in re.findall(r"^Status longdraft_(\w+)\(([^()]*)\);", _SOURCE, re.MULTILINE)
}
