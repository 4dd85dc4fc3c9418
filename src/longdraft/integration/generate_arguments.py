"""Arguments that ``generate`` does not hand to a custom loop: tokenizer, streamer, assistant, the user's cache.

``generate`` reads a custom loop's signature to see which keywords it takes. By then it has removed ``tokenizer``,
``streamer`` and ``assistant_model`` from its keywords, so that they reach no custom loop, whatever its signature names:
stop strings would lack a tokenizer, and the reader of a stream would wait for ever. The moment when it reads the
signature is the only one when they can be had: our signature looks at the calling frame, and puts them back among the
keywords. Nothing is stored, so threads do not meet. Any other caller just gets the signature.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from transformers import GenerationMixin

# Names of a forward's cache: since transformers 5.24, before, and before for Mamba's kind.
CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")
# Frames of `inspect` between generate's call and ours, at most.
_DEPTH = 16


@dataclass(frozen=True)
class GenerateArguments:
    """Arguments of ``generate`` that it does not hand on.

    Attributes:
        assistant: the draft model of transformers' assisted decoding.
        cache: whether the user gave a cache; if not, ``generate`` makes one.
        synced: whether to generate in step with other processes.
    """

    streamer: Any = None
    assistant: Any = None
    cache: bool = False
    synced: bool = False


def find_cache(keywords: dict[str, Any]) -> Any:
    """Returns the cache of a forward's keywords, under any of :data:`CACHE_KEYWORDS`; None: there is none."""
    return next((cache for name in CACHE_KEYWORDS if (cache := keywords.get(name)) is not None), None)


class CustomGenerateSignature(inspect.Signature):
    """The ``__signature__`` of a custom loop's class, whose ``__call__`` names ``given``. The class has that of its
    constructor, which is this object: tools that take a class apart (%autoreload) put it into another one.

    Args:
        decode: takes the keywords that the loop passes on; it names ``tokenizer``.
        constructor: of the class.
    """

    def __init__(self, decode: Callable[..., Any], constructor: Callable[..., Any]) -> None:
        super().__init__([*inspect.signature(constructor).parameters.values()][1:])
        self._decode = decode

    def __get__(self, loop: Any, owner: type) -> inspect.Signature:
        if loop is None:
            return self
        if (asking := _generate()) is not None:
            _hand_over(asking.f_locals)
        own, others = (list(inspect.signature(f).parameters.values()) for f in (owner.__call__, self._decode))
        keywords = [p for p in others if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        return inspect.Signature([*own[1:-1], *keywords])


def _generate() -> FrameType | None:
    """Returns the frame of the method of ``generate`` that reads a loop's signature, if that is what is calling."""
    method = getattr(GenerationMixin, "_extract_generation_mode_kwargs", None)
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if method is None or frame is None or frame.f_code is method.__code__:
            return frame if method is not None else None
        frame = frame.f_back
    return None


def _hand_over(names: dict[str, Any]) -> None:
    """Puts removed arguments back among the keywords; may be called twice."""
    keywords, taken = names.get("kwargs"), names.get("generation_mode_kwargs")
    if not isinstance(keywords, dict) or not isinstance(taken, dict):
        return
    if (tokenizer := taken.get("tokenizer")) is not None:
        keywords["tokenizer"] = tokenizer
    keywords["given"] = GenerateArguments(
        streamer=names.get("streamer"),
        assistant=names.get("assistant_model"),
        cache=find_cache(keywords) is not None,
        synced=bool(taken.get("synced_gpus")),
    )
