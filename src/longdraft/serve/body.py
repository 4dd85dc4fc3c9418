"""Reads the bodies of requests. Whatever they are, the error says what is wrong with them."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, TypeVar

from pydantic import ValidationError

from longdraft.serve.errors import ApiError
from longdraft.serve.schema import Strict

T = TypeVar("T", bound=Strict)
# Levels of objects and lists within one another; readers of schemas and templates go down one by one.
_LEVELS = 96
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def read(kind: type[T], body: bytes, content_type: str) -> T:
    """The body as an object of a class of :mod:`longdraft.serve.schema`.

    Raises:
        ApiError: it is none.
    """
    if "json" not in content_type:
        raise ApiError(415, f"The body is JSON: say so with the header Content-Type: application/json, not with "
                       f"{content_type or 'none'!r}.", param="Content-Type")  # fmt: skip
    try:
        text = body.decode()
        found = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if _HALF_CHARACTER.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON text in UTF-8: {error}.") from None
    if _deep(found):
        raise ApiError(400, f"The body has more than {_LEVELS} levels of objects and lists within one another.")
    return validated(kind, found)


def validated(kind: type[T], found: Any) -> T:
    """JSON's values as an object of the class.

    Raises:
        ApiError: they are none.
    """
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        # The deepest one is what is wrong with the kind of value that was meant, where a field takes several kinds.
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        field = ".".join(str(x) for x in first["loc"] if str(x) != "str" and "[" not in str(x))
        problem = "is not served" if first["type"] == "extra_forbidden" else f"cannot be used: {first['msg']}"
        if first["type"] == "literal_error":
            problem += f", not {str(first['input'])[:60]!r}"
        raise ApiError(400, f"{field or 'The body'} {problem}.", param=field or None) from None


def _finite(number: str) -> float:
    value = float(number)
    if not isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


def _deep(value: Any) -> bool:
    level = [value]
    for _ in range(_LEVELS):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
