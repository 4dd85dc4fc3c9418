"""What ``generate`` does not hand to a custom loop: tokenizer, streamer, assistant, and whether a cache was given.

``generate`` asks for a custom loop's signature to see which keywords it wants. Until then it has taken ``tokenizer``,
``streamer`` and ``assistant_model`` out of what it looks through, so that they reach no custom loop, whatever its
signature names: stop strings then lack a tokenizer, and the reader of a stream waits for ever. The one moment when they
can be had is that question, which is answered here: a signature of ours looks at who asks, and puts what it finds among
the keywords that are looked through next. Nothing is kept, so threads do not meet. Anyone else who asks gets the
signature and nothing more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from transformers import GenerationMixin

# Frames between the question and its answer: those of inspect.
_DEPTH = 16


@dataclass(frozen=True)
class Given:
    """What the user gave ``generate`` that it does not hand on.

    Attributes:
        assistant: a model to draft, of transformers' assisted decoding.
        cache: whether the user gave a cache; ``generate`` makes one where not.
        synced: generation in step with other processes.
    """

    streamer: Any = None
    assistant: Any = None
    cache: bool = False
    synced: bool = False


def given_cache(keywords: dict[str, Any]) -> Any:
    """The cache among a forward's keywords, or None: ``cache`` since transformers 5.24, ``past_key_values`` before."""
    cache = keywords.get("cache")
    return keywords.get("past_key_values") if cache is None else cache


class HandedOver:
    """The ``__signature__`` of a custom loop's class, whose ``__call__`` names ``tokenizer`` and ``given``."""

    def __get__(self, loop: Any, owner: type) -> inspect.Signature:
        if loop is None:  # the class has the signature of its constructor
            raise AttributeError("__signature__")
        own = inspect.signature(owner.__call__)
        if (asking := _generate()) is not None:
            _hand_over(asking.f_locals)
        return own.replace(parameters=list(own.parameters.values())[1:])


def _generate() -> FrameType | None:
    """The frame of the method of ``generate`` that looks at a loop's signature, if it is what asks."""
    method = getattr(GenerationMixin, "_extract_generation_mode_kwargs", None)
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if method is None or frame is None or frame.f_code is method.__code__:
            return frame if method is not None else None
        frame = frame.f_back
    return None


def _hand_over(names: dict[str, Any]) -> None:
    """Puts what ``generate`` has taken out back among its keywords; called twice, it does the same again."""
    keywords, taken = names.get("kwargs"), names.get("generation_mode_kwargs")
    if not isinstance(keywords, dict) or not isinstance(taken, dict):
        return
    if (tokenizer := taken.get("tokenizer")) is not None:
        keywords["tokenizer"] = tokenizer
    keywords["given"] = Given(
        streamer=names.get("streamer"),
        assistant=names.get("assistant_model"),
        cache=given_cache(keywords) is not None,
        synced=bool(taken.get("synced_gpus")),
    )


@contextmanager
def streaming(streamer: Any) -> Iterator[None]:
    """Ends a stream with the work inside, and when that fails: the reader in another thread would wait for ever."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()
