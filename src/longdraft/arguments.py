"""Checks arguments of calls: suggests what was meant by an unknown name, and refuses values of a wrong kind."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from longdraft.errors import ArgumentError, RequestError

P = ParamSpec("P")
R = TypeVar("R")

_NO_BEAMS = "longdraft decodes greedily or by sampling, one output a prompt: leave it out"
_SEVERAL = "give the prompt several times; each samples with a seed of its own"
_GREEDY = "temperature=0 is greedy, a temperature above 0 samples"
_PENALTY = "there is repetition_penalty here, and Request(prompt, processors=[...]) for others"
_GENERATED = "it is a setting of what is generated, not of the method"
# Names in other libraries -> the argument's name here, or advice.
_ELSEWHERE = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens counts the new tokens alone",
    "num_tokens": "max_new_tokens", "new_tokens": "max_new_tokens", "n_predict": "max_new_tokens",
    "stop_strings": "stop", "stop_sequences": "stop", "stop_words": "stop",
    "eos_token_id": "eos_token_ids", "stop_token_ids": "eos_token_ids", "eos": "eos_token_ids",
    "ignore_eos": "eos_token_ids=[] decodes on to max_new_tokens",
    "do_sample": _GREEDY, "use_beam_search": _NO_BEAMS, "num_beams": _NO_BEAMS, "num_beam_groups": _NO_BEAMS,
    "n": _SEVERAL, "best_of": _SEVERAL, "num_return_sequences": _SEVERAL,
    "sampling_params": "sampling", "generation_config": "give its values by name, such as temperature= and top_p=",
    "temp": "temperature", "random_seed": "seed", "generator": "seed",
    "frequency_penalty": _PENALTY, "presence_penalty": _PENALTY,
    "logits_processor": "Request(prompt, processors=[...]) takes them",
    "streamer": "iterate over stream(...), whose steps have the text", "stream": "iterate over stream(...)",
    "batch_size": "batch", "max_num_seqs": "batch", "past_key_values": "cache", "prompt_cache": "cache",
    "use_cache": "the KV is always kept; cache=PromptCache() keeps it for the next call",
    "prompt": "prompts", "inputs": "prompts", "input_ids": "prompts", "prompt_token_ids": "prompts", "text": "prompts",
    "messages": "give the token ids of tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
    "return_dict=False)",
    "apply_chat_template": "chat", "raw": "chat=False continues a text as it is",
    "model": "target", "base_model": "target", "target_model": "target", "draft_model": "draft",
    "assistant_model": "draft", "speculative_model": "draft", "num_speculative_tokens": "depth",
    "num_assistant_tokens": "depth", "prompt_lookup_num_tokens": "max_draft", "gamma": "depth",
    "temperature": _GENERATED, "top_p": _GENERATED, "min_p": _GENERATED, "repetition_penalty": _GENERATED,
    "max_new_tokens": _GENERATED, "seed": _GENERATED, "stop": _GENERATED, "sampling": _GENERATED,
    "torch_dtype": "dtype", "device_map": "device", "model_id": "model", "model_name": "model", "path": "model",
}  # fmt: skip


def suggestion(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name, to follow a colon in a message; empty if there is none."""
    names = [*known]
    elsewhere = _ELSEWHERE.get(name, "")
    if elsewhere in names:
        return f"it is {elsewhere} here."
    if elsewhere and not elsewhere.isidentifier():
        return f"{elsewhere}."
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


def with_suggestions(call: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a call: an unknown argument raises an error that suggests what was meant.

    Raises (when called):
        ArgumentError: in place of Python's TypeError.
    """
    signature = inspect.signature(call)
    names = [name for name in signature.parameters if name != "self"]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    title = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(call)
    def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names and not open_ended:
                advice = suggestion(name, names) or f"it has {', '.join(names)}."
                raise ArgumentError(f"{title} has no argument {name}: {advice}")
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{title}: {error}. Its arguments: {', '.join(names)}.") from None
        return call(*args, **kwargs)

    return answered


T = TypeVar("T")


def class_with_suggestions(kind: type[T]) -> type[T]:
    """Decorator of a class: the same for its ``__init__``."""
    setattr(kind, "__init__", with_suggestions(kind.__init__))  # noqa: B010 - mypy knows no other way
    return kind


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number in a range.

    Raises:
        RequestError: the value is no whole number, or outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} must be a whole number, got {value!r}")
    number = int(value)
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} must be {limits}, got {number}")
    return number


def check_number(name: str, value: Any) -> None:
    """Raises RequestError unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise RequestError(f"{name} must be a number, got {value!r}")
