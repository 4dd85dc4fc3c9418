"""Arguments that ``generate`` does not pass to a custom loop: tokenizer, streamer, assistant, the user's cache.

``generate`` removes ``tokenizer``, ``streamer`` and ``assistant_model`` from its keywords, so no custom loop gets them:
stop strings would lack a tokenizer, and the reader of a stream would wait for ever. After that, ``generate`` reads the
loop's signature, to see which keywords the loop accepts. So our ``__signature__`` is a descriptor. If ``generate``
reads it, the descriptor finds the frame of ``generate``, and puts the arguments back among the keywords there. Other
callers just get the signature. The descriptor stores nothing, so it is thread-safe.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from transformers import GenerationMixin

from longdraft.model.compat import CACHE_NAMES

# Maximum number of frames of `inspect` between `generate` and the descriptor.
_MAX_INSPECT_FRAMES = 16


@dataclass(frozen=True)
class GenerateArguments:
    """Arguments of ``generate`` that it does not pass to a custom loop.

    Attributes:
        streamer: gets the new tokens, see :class:`transformers.TextStreamer`.
        assistant: the draft model of transformers' assisted decoding.
        has_user_cache: True if the user passed a cache, in place of the cache that ``generate`` makes.
        is_synced: True to generate in lockstep with other processes (``synced_gpus``).
    """

    streamer: Any = None
    assistant: Any = None
    has_user_cache: bool = False
    is_synced: bool = False


def find_cache(keywords: dict[str, Any]) -> Any:
    """Returns the cache among a forward's keywords, under any of :data:`CACHE_NAMES`; None if there is none."""
    return next((cache for name in CACHE_NAMES if (cache := keywords.get(name)) is not None), None)


class CustomGenerateSignature(inspect.Signature):
    """The ``__signature__`` of a custom loop's class. The class's ``__call__`` must have the keyword ``generate_args``.

    On the class, ``__signature__`` is the constructor's signature; on an instance (the loop), that of a call. As a
    descriptor it still works after a tool such as %autoreload has copied it to another class.

    Args:
        decode: the function with all keywords of the loop, ``tokenizer`` among them.
        constructor: the ``__init__`` of the class.
    """

    def __init__(self, decode: Callable[..., Any], constructor: Callable[..., Any]) -> None:
        super().__init__([*inspect.signature(constructor).parameters.values()][1:])  # without self
        self._decode = decode

    def __get__(self, loop: Any, owner: type) -> inspect.Signature:
        if loop is None:
            return self
        if (generate_frame := _find_generate_frame()) is not None:
            _restore_keywords(generate_frame.f_locals)
        functions = owner.__call__, self._decode
        call_parameters, decode_parameters = (list(inspect.signature(f).parameters.values()) for f in functions)
        keywords = [p for p in decode_parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        return inspect.Signature([*call_parameters[1:-1], *keywords])  # without self and **call


def _find_generate_frame() -> FrameType | None:
    """Returns the frame in which ``generate`` reads a loop's signature; None if another caller reads it."""
    method = getattr(GenerationMixin, "_extract_generation_mode_kwargs", None)
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_INSPECT_FRAMES):
        if method is None or frame is None or frame.f_code is method.__code__:
            return frame if method is not None else None
        frame = frame.f_back
    return None


def _restore_keywords(frame_locals: dict[str, Any]) -> None:
    """Puts the removed arguments back among the keywords of ``generate``. A second call changes nothing."""
    keywords, mode_kwargs = frame_locals.get("kwargs"), frame_locals.get("generation_mode_kwargs")
    if not isinstance(keywords, dict) or not isinstance(mode_kwargs, dict):
        return
    if (tokenizer := mode_kwargs.get("tokenizer")) is not None:
        keywords["tokenizer"] = tokenizer
    keywords["generate_args"] = GenerateArguments(
        streamer=frame_locals.get("streamer"),
        assistant=frame_locals.get("assistant_model"),
        has_user_cache=find_cache(keywords) is not None,
        is_synced=bool(mode_kwargs.get("synced_gpus")),
    )
