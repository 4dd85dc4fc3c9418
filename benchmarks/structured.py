"""Rounds and seconds of answers that are bound to a grammar, with what it forces drafted and without.

    python -m benchmarks.structured
    python -m benchmarks.structured --model coder-1.5b.gguf --methods prompt-lookup --repeats 5

A round is a forward of the target; the first token is the prompt's. Without means the same grammar, as a logits
processor that nobody asks ahead. Tokens are compared with those of plain decoding (method ar). Texts are decoded in
turns, and seconds are medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import longdraft
from longdraft import Request, Result, Speculator
from longdraft.model.chat import conversation
from longdraft.serve import structured, tools

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string"},
        "last_name": {"type": "string"},
        "occupation": {"enum": ["scientist", "engineer", "musician", "painter", "politician"]},
        "year_of_birth": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "nationality": {"type": "string"},
        "still_living": {"type": "boolean"},
        "known_for": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["first_name", "last_name", "occupation", "year_of_birth", "nationality", "still_living", "known_for"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather_forecast",
        "description": "The weather forecast of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "country": {"type": "string"},
                "number_of_days": {"type": "integer", "minimum": 1, "maximum": 14},
                "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "country", "number_of_days", "temperature_unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_current_time", "parameters": {"type": "object"}}}


def prompts(tokenizer: Any) -> dict[str, tuple[list[int], str]]:
    """By name: token ids of a chat, and the grammar of its answer."""

    def asked(text: str, offered: list[dict[str, Any]]) -> list[int]:
        messages, template = tools.with_tools(tokenizer, [{"role": "user", "content": text}], offered)
        return conversation(tokenizer, messages, **template)

    schema = f"Describe the physicist Marie Curie. Answer in JSON of this schema: {json.dumps(PERSON)}"
    call = "What will the weather be in Oslo, Norway, in the next three days, in celsius?"
    offered = [WEATHER, TIME]
    return {
        "JSON schema": (asked(schema, []), structured.json_grammar(PERSON)),
        "tool call": (asked(call, offered), tools.grammar_for_tools(tokenizer, offered, "required", parallel=False)),
    }


def decoded(spec: Speculator, tokenizer: Any, prompt: list[int], grammar: str, ahead: bool, options: Any) -> Result:
    """An answer that is bound to a grammar. ``ahead``: what the grammar forces is drafted."""
    constraint = structured.Constraint(tokenizer, grammar, len(prompt))
    processor: Callable[..., Any] = constraint if ahead else lambda ids, scores: constraint(ids, scores)
    request = Request(
        prompt, options.tokens, temperature=options.temperature, seed=options.seed, processors=[processor]
    )
    return spec.generate(request)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a GGUF file or a name; the embedded model if left out")
    parser.add_argument("--methods", default="prompt-lookup,self", help="with commas between")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, in turns")
    parser.add_argument("--plan", choices=("auto", "fixed"), default="fixed", help="fixed trees: rounds do not vary")
    options = parser.parse_args()
    model, tokenizer = longdraft.load(*([options.model] if options.model else []))
    names = ["ar", *options.methods.split(",")]
    specs = {name: Speculator(name, model, tokenizer, plan=options.plan) for name in names}
    for spec in specs.values():
        spec.planner()  # measures before anything is timed
    for what, (prompt, grammar) in prompts(tokenizer).items():
        cases = [("ar", False), *((name, ahead) for name in names[1:] for ahead in (False, True))]
        results: dict[tuple[str, bool], list[Result]] = {case: [] for case in cases}
        for _ in range(options.repeats):
            for name, ahead in cases:
                results[name, ahead].append(decoded(specs[name], tokenizer, prompt, grammar, ahead, options))
        plain = results["ar", False][0]
        print(f"{what}: {plain.new_tokens} tokens, {plain.finish_reason}: {plain.text}")
        for (name, ahead), found in results.items():
            same = all(result.token_ids == plain.token_ids for result in found)
            seconds = median(result.decode_seconds for result in found)
            case = f"{name}, {'with' if ahead else 'without'}"
            print(f"  {case:<24} {found[-1].rounds:4} rounds  {seconds:7.3f} s  {'equal' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
