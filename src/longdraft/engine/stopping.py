"""Rules that end a sequence; they are called after each emitted token."""

from __future__ import annotations

from collections.abc import Callable

from longdraft.engine.sequence import FinishReason, Sequence, StopRule


def eos_rule(eos: frozenset[int]) -> StopRule:
    """Finishes at any of several end-of-sequence tokens."""

    def rule(s: Sequence) -> FinishReason | None:
        return "eos" if s.output[-1] in eos else None

    return rule


def stop_string_rule(stops: tuple[str, ...], decode: Callable[[list[int]], str]) -> StopRule:
    """Finishes when a stop string appears in the output's text, wherever token borders fall.

    Args:
        decode: token ids to text, with special tokens if a stop string names one.
    """
    # A stop string of k bytes spans at most k tokens, and k UTF-8 characters are at most 4k bytes.
    window = 4 * max(map(len, stops)) + 8

    def rule(s: Sequence) -> FinishReason | None:
        tail = decode(s.output[-window:])
        return "stop" if any(stop in tail for stop in stops) else None

    return rule
