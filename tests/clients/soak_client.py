"""One client of a soak: asks through its package, again and again, until it is killed; a line of JSON a request.

``python soak_client.py PACKAGE SEED LOG`` with BASE_URL and MODEL in the environment. What a request asks follows from
its key alone, so two answers with the same key must be the same text.
"""

from __future__ import annotations

import json
import os
import random
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(textwrap.__file__).read_text()
SIZES = (0, 0, 600, 8000, 15000)  # characters before the question: up to some 4,000 tokens, which begin alike
QUESTIONS = ("Name one class of Python's library.", "What is a column?", "Which function wraps text?", "Write a list.")
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a function up",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
CITY = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "inhabitants": {"type": "integer"}},
            "required": ["name", "inhabitants"],
        },
    },
}
# What an answer is: prompt tokens, new tokens (-1: not told), what was said.
Answer = tuple[int, int, str]


class Away(Exception):
    """The client left its stream."""


def messages(size: int, question: int) -> list[dict[str, str]]:
    document = SOURCE[:size] + "\n\n" if size else ""
    return [{"role": "user", "content": document + QUESTIONS[question]}]


def whole(answer: Any) -> Answer:
    choice = answer.choices[0]
    said = choice.text if hasattr(choice, "text") else choice.message.content
    calls = [] if hasattr(choice, "text") else choice.message.tool_calls or []
    said = (said or "") + "".join(f"{call.function.name}({call.function.arguments})" for call in calls)
    return answer.usage.prompt_tokens, answer.usage.completion_tokens, said


def streamed(chunks: Iterator[Any], leave_after: int = 0) -> Answer:
    said, usage = "", None
    for number, chunk in enumerate(chunks, 1):
        if chunk.choices:
            said += chunk.choices[0].delta.content or ""
        usage = getattr(chunk, "usage", None) or usage
        if number == leave_after:
            chunks.close()  # type: ignore[attr-defined]
            raise Away
    return usage.prompt_tokens, usage.completion_tokens, said  # type: ignore[union-attr]


def by_openai(base: str, model: str) -> dict[str, Callable[[int, int, float], Answer]]:
    import openai

    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=300)
    chats, texts = client.chat.completions, client.completions

    def chat(size: int, question: int, temperature: float, **more: Any) -> Any:
        told = {"messages": messages(size, question), "temperature": temperature, "seed": question, "max_tokens": 40}
        return chats.create(model=model, **(told | more))

    def stream(*asked: Any, leave_after: int = 0) -> Answer:
        return streamed(chat(*asked, stream=True, stream_options={"include_usage": True}), leave_after)

    def tool(size: int, *asked: Any) -> Answer:
        return whole(chat(min(size, 600), *asked, tools=[LOOK_UP], tool_choice="required"))

    def fill(size: int, question: int, temperature: float) -> Answer:
        place = 2000 + 1500 * question
        before, after = SOURCE[max(0, place - size) : place], SOURCE[place + 80 : place + 600]
        return whole(texts.create(model=model, prompt=before or "\n", suffix=after, temperature=0, max_tokens=32))

    def echo(size: int, question: int, temperature: float) -> Answer:
        text = SOURCE[: min(size, 2000)] + QUESTIONS[question]
        answer = texts.create(model=model, prompt=text, echo=True, logprobs=1, max_tokens=1, temperature=0)
        scored = answer.choices[0].logprobs.token_logprobs
        assert len(scored) == answer.usage.prompt_tokens + answer.usage.completion_tokens and scored[0] is None
        return whole(answer)

    return {
        "chat": lambda *asked: whole(chat(*asked)),
        "stream": stream,
        "leave": lambda *asked: stream(*asked, leave_after=4),
        "tool": tool,
        "schema": lambda size, *asked: whole(chat(min(size, 600), *asked, response_format=CITY)),
        "fill": fill,
        "echo": echo,
    }


def by_litellm(base: str, model: str) -> dict[str, Callable[[int, int, float], Answer]]:
    import litellm

    litellm.suppress_debug_info = True

    def ask(size: int, question: int, temperature: float, **more: Any) -> Any:
        told = {"messages": messages(size, question), "temperature": temperature, "seed": question, "max_tokens": 40}
        where = {"model": f"openai/{model}", "api_base": base, "api_key": "none", "num_retries": 0, "timeout": 300}
        return litellm.completion(**where, **told, **more)

    return {
        "chat": lambda *asked: whole(ask(*asked)),
        "stream": lambda *asked: streamed(ask(*asked, stream=True, stream_options={"include_usage": True})),
    }


def by_langchain(base: str, model: str) -> dict[str, Callable[[int, int, float], Answer]]:
    from langchain_openai import ChatOpenAI

    def chat(size: int, question: int, temperature: float) -> Answer:
        where = {"model": model, "base_url": base, "api_key": "none", "max_retries": 0, "timeout": 300}
        client = ChatOpenAI(**where, temperature=temperature, seed=question, max_tokens=40)
        answer = client.invoke(messages(size, question))
        used = answer.usage_metadata
        return used["input_tokens"], used["output_tokens"], str(answer.content)

    return {"chat": chat}


def main() -> None:
    package, seed, log = sys.argv[1:]
    by = {"openai": by_openai, "litellm": by_litellm, "langchain": by_langchain}[package]
    kinds = by(os.environ["BASE_URL"], os.environ["MODEL"])
    choose = random.Random(int(seed))
    with Path(log).open("a", buffering=1) as lines:
        while True:
            while Path(log).with_name("hold").exists():
                time.sleep(0.1)
            kind, temperature = choose.choice(list(kinds)), choose.choice((0.0, 0.0, 0.8))
            size, question = choose.choice(SIZES), choose.randrange(len(QUESTIONS))
            started = time.time()
            told = {"kind": kind, "size": size, "question": question, "temperature": temperature, "began": started}
            lines.write(json.dumps({"state": "begun"} | told) + "\n")
            try:
                prompt, new, said = kinds[kind](size, question, temperature)
                end = {"state": "done", "prompt": prompt, "new": new, "said": said}
            except Away:
                end = {"state": "left"}
            except Exception as error:
                status = getattr(error, "status_code", None)
                end = {"state": "failed", "status": status, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            lines.write(json.dumps(end | told | {"ended": time.time()}) + "\n")
            if end["state"] == "failed":
                time.sleep(1)


if __name__ == "__main__":
    main()
