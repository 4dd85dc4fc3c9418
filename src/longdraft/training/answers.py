"""Generates training data: samples prompts about passages of documents, and has a server answer them.

A draft learns best from the target's own answers. A draft that is trained on plain text does poorly on answers. All
prompts about a passage share their beginning up to its end, so a prefix cache computes its KV once. Any server with
OpenAI's API will do: vLLM, SGLang, llama.cpp, longdraft serve.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from longdraft.errors import CapabilityError, LongdraftError, PromptError, reason_of
from longdraft.json_lines import JsonLines

# Prefixes of a passage ("openings"), questions after it by kind, and prompts without a passage ("free"), in which {} is
# replaced by a few words of a text.
PROMPTS: dict[str, list[str]] = json.loads(files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
# Lines of source code.
CODE_LINE = re.compile(r"^\s*(def|class|import|from|return|if|for|#include|fn|let|pub|self\.)\b", re.M)
# Share of the passages that are replaced by free prompts.
FREE_PROMPT_SHARE = 0.12
# Prompts in a row without an answer after which the run gives up.
MAX_REFUSALS = 32
# Retries of a request, after 0.5, 1, 2, 4, 8, 8, ... seconds, while the server is unreachable or busy.
RETRIES = 8
# Seconds until a request times out, and between two calls of ``stop``.
_TIMEOUT, _POLL_INTERVAL = 3600.0, 0.2

Example = dict[str, Any]


@dataclass(frozen=True)
class AnswerPrompt:
    """A prompt to be answered at ``temperature``.

    Attributes:
        kind: the task, a key of :data:`PROMPTS`. source: the file or corpus of the passage.
    """

    text: str
    temperature: float
    kind: str = ""
    source: str = ""


def sample_prompts(
    texts: Sequence[tuple[str, str]],
    passage_tokens: tuple[int, int],
    per_passage: int,
    temperatures: Sequence[float],
    seed: int,
) -> Iterator[list[AnswerPrompt]]:
    """Samples passages without end, and yields for each at most ``per_passage`` prompts with a common beginning.

    Args:
        texts: (document, its file or corpus). A document is sampled in proportion to the square root of its length.
        passage_tokens: shortest and longest passage, in tokens of four characters; lengths are log-uniform.
        temperatures: cycled over the prompts of a passage.

    Raises:
        PromptError: all texts are empty.
    """
    if not any(text.strip() for text, _ in texts):
        raise PromptError("There is no text to ask about: rows need `text`.")
    rng = random.Random(seed)
    weights = list(accumulate(len(text) ** 0.5 for text, _ in texts))

    def sample_passage(length: int) -> tuple[str, str]:
        ((text, source),) = rng.choices(texts, cum_weights=weights)
        start = rng.randrange(max(1, len(text) - length))
        return text[start : start + length].strip(), source

    while True:
        low, high = passage_tokens
        passage, source = sample_passage(int(4 * low * (high / low) ** rng.random()))
        if rng.random() < FREE_PROMPT_SHARE:
            topics = (" ".join(sample_passage(120)[0].split()[1 : 1 + rng.randint(1, 4)]) for _ in range(per_passage))
            free = (rng.choice(PROMPTS["free"]).replace("{}", topic.strip(".,;:!?\"'()")) for topic in topics if topic)
            prompts = [(text, "free") for text in free]
        elif passage:
            opening = rng.choice(PROMPTS["openings"])
            prompts = [(opening + passage + text, kind) for text, kind in _sample_questions(passage, per_passage, rng)]
        else:
            continue
        if prompts:
            pairs = zip(prompts, cycle(temperatures), strict=False)
            yield [AnswerPrompt(text, temperature, kind, source) for (text, kind), temperature in pairs]


def _sample_questions(passage: str, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Samples (question, kind) pairs that suit the passage: a transcript, code or prose."""
    # Kind -> how many of its questions may be taken; None: all.
    kinds: dict[str, int | None] = {"summary": None, "question": None, "task": None}
    # A transcript names the speaker of each of its many short turns.
    if passage.count(" :") + passage.count(": ") > len(passage) / 600:
        kinds = {"meeting": None, "summary": None, "question": 6}
    if len(CODE_LINE.findall(passage)) > len(passage) / 200:
        kinds = {"code": None, "question": 2}
    questions = [(text, kind) for kind, limit in kinds.items() for text in PROMPTS[kind][:limit]]
    return rng.sample(questions, min(count, len(questions)))


class AnswerFile:
    """A JSONL file of answers. Answers are appended as they arrive, also to those of an earlier run.

    A row holds ``messages`` (with ``reasoning_content`` if the server separates it), ``cut`` (True: the answer reached
    max_new_tokens), ``usage`` (prompt and completion tokens that the server reports), ``temperature``, ``source`` and
    ``kind`` of the prompt, and ``at`` (number of the passage, number of the prompt within it, prompts of the passage).

    Attributes:
        answered: (passage, prompt within it) of each answer.
        usage: prompt and completion tokens that the server reports, summed over all answers.
        new_tokens: completion tokens of this run. num_refused: prompts of this run without an answer.

    Raises:
        CheckpointError: the file cannot be read, or holds something else and is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.answered, self.usage, self.new_tokens, self.num_refused = set[tuple[int, int]](), [0, 0], 0, 0
        self.path, self._file = path, JsonLines(path, lambda number, example: self._count(example))

    def append(self, example: Example) -> None:
        """Appends an answer, in the place of a torn last line. Raises CheckpointError if that fails."""
        self._file.append(example)
        self._count(example)
        self.new_tokens += example["usage"][1]

    def _count(self, example: Example) -> None:
        passage, prompt, _ = example["at"]
        self.answered.add((passage, prompt))
        self.usage = [a + b for a, b in zip(self.usage, example["usage"], strict=True)]

    @property
    def num_answers(self) -> int:
        """The number of answers in the file."""
        return self._file.num_lines


def generate_answers(
    prompts: Iterator[list[AnswerPrompt]],
    file: AnswerFile,
    url: str,
    api_key: str = "",
    model: str | None = None,
    *,
    rows: int,
    batch: int,
    max_new_tokens: int,
    template: Mapping[str, Any] | None = None,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Has a server answer prompts, and appends each answer to the file as it arrives.

    A killed run continues with the prompts that have no answer yet.

    Args:
        prompts: for each passage, the prompts about it.
        url: the server's address, with or without ``/v1``. api_key: the bearer token.
        model: the model's name at the server; None: the first that it lists.
        rows: number of answers in the file at the end. batch: requests in flight.
        template: ``chat_template_kwargs`` for the server, stored in the answers too.
        progress: called after each answer.
        stop: polled a few times a second; True ends the run, and requests in flight are lost.

    Raises:
        CapabilityError: the package openai is missing, or the server is unreachable, fails, or has another API.
        PromptError: the server refuses many prompts in a row.
        CheckpointError: the file cannot be written.
    """
    try:
        from openai import APIError, AsyncOpenAI, BadRequestError, UnprocessableEntityError
    except ImportError:
        raise CapabilityError('--url needs the package openai: pip install "longdraft[train]".') from None
    address = url.rstrip("/").removesuffix("/v1") + "/v1"
    kept = f"The answers in {file.path} are kept; the same command continues from there."
    # The prompts without an answer, each with the ``at`` of its row.
    unanswered = (
        ([passage, i, len(group)], prompt)
        for passage, group in enumerate(prompts)
        for i, prompt in enumerate(group)
        if (passage, i) not in file.answered
    )

    async def request(client: AsyncOpenAI, name: str, at: list[int], prompt: AnswerPrompt) -> Example | str:
        """Returns the row of a prompt's answer, or the reason why there is none."""
        turn = {"role": "user", "content": prompt.text}
        settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": prompt.temperature}
        settings |= {"extra_body": {"chat_template_kwargs": template}} if template else {}
        try:
            reply: Any = await client.chat.completions.create(model=name, messages=[turn], **settings)  # type: ignore[list-item]
        except (BadRequestError, UnprocessableEntityError) as error:
            return reason_of(error)
        if not isinstance(getattr(reply, "choices", None), list) or not reply.choices:
            raise CapabilityError(f"{url} does not answer as OpenAI's API does. {kept}")
        choice, usage = reply.choices[0], reply.usage
        message = {"content": choice.message.content or ""}
        # Servers use one of two keys for reasoning.
        reasoning = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
        message |= {"reasoning_content": reasoning} if reasoning else {}
        if not "".join(message.values()).strip():
            return "no text"
        return {
            "messages": [turn, {"role": "assistant", **message}],
            **({"chat_template_kwargs": template} if template else {}),
            "cut": choice.finish_reason == "length",
            "usage": [0, 0] if usage is None else [usage.prompt_tokens, usage.completion_tokens],
            "temperature": prompt.temperature,
            "source": prompt.source,
            "kind": prompt.kind,
            "at": at,
        }

    async def run() -> None:
        in_flight, refusals = set[asyncio.Task[Example | str]](), 0
        async with AsyncOpenAI(
            base_url=address, api_key=api_key or "none", max_retries=RETRIES, timeout=_TIMEOUT
        ) as client:
            name = model
            if name is None:
                models = await client.models.list()
                if not models.data:
                    raise CapabilityError(f"{url} lists no model: name one with --target.")
                name = models.data[0].id
            try:
                while not stop():
                    while len(in_flight) < min(batch, rows - file.num_answers) and (args := next(unanswered, None)):
                        in_flight.add(asyncio.create_task(request(client, name, *args)))
                    if not in_flight:
                        break
                    done, in_flight = await asyncio.wait(
                        in_flight, timeout=_POLL_INTERVAL, return_when=asyncio.FIRST_COMPLETED
                    )
                    # Failed tasks come last, so that answers of the same round are written before one raises.
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        if not isinstance(answer := task.result(), str):
                            file.append(answer)
                            refusals = 0
                            progress()
                            continue
                        file.num_refused, refusals = file.num_refused + 1, refusals + 1
                        if refusals == MAX_REFUSALS:
                            why = f"{MAX_REFUSALS} prompts in a row got no answer ({answer})"
                            raise PromptError(f"{why}: shorten passages. {kept}")
            finally:
                for task in in_flight:
                    task.cancel()
                await asyncio.gather(*in_flight, return_exceptions=True)

    try:
        asyncio.run(run())
    except LongdraftError:
        raise
    except (APIError, ValueError) as error:
        why = reason_of(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        raise CapabilityError(f"{url} cannot be reached any more: {why}. {kept}") from error
