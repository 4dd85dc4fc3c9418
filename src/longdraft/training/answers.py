"""Generates training data: samples prompts about passages of documents, and has a server answer them.

A draft learns best from the target's own answers: a draft trained on plain text does poorly on answers. All prompts
about a passage begin with the passage, so a server with a prefix cache computes the passage's KV once. The server needs
OpenAI's API: vLLM, SGLang, llama.cpp, longdraft serve.
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

from longdraft.errors import CapabilityError, LongdraftError, PromptError, needs_extra, reason_of
from longdraft.json_lines import JsonLines

# Parts of prompts by key. "openings": sentences before a passage. "free": prompts without a passage, with {} for a
# topic. Every other key is a kind of question, which comes after a passage.
PROMPTS: dict[str, list[str]] = json.loads(files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
# A line of code begins with one of these words.
CODE_LINE = re.compile(r"^\s*(def|class|import|from|return|if|for|#include|fn|let|pub|self\.)\b", re.M)
# Fraction of the passages that are replaced by prompts without a passage.
FREE_PROMPT_SHARE = 0.12
# A run fails after this many prompts in a row without an answer.
MAX_REFUSALS = 32
# Retries of a request, after 0.5, 1, 2, 4, 8, 8, ... seconds, while the server is unreachable or busy.
RETRIES = 8
# In seconds: the time limit of a request, and the time between two calls of ``stop``.
_REQUEST_TIMEOUT, _POLL_INTERVAL = 3600.0, 0.2

# A row of a file of answers, as JSON.
AnswerRow = dict[str, Any]


@dataclass(frozen=True)
class AnswerPrompt:
    """A prompt, with the sampling temperature of its answer."""

    text: str
    temperature: float
    kind: str = ""  # the key of :data:`PROMPTS` that the question belongs to
    source: str = ""  # the file or corpus of the passage


def sample_prompts(
    texts: Sequence[tuple[str, str]], passage_tokens: tuple[int, int], per_passage: int, temperatures: Sequence[float],
    seed: int,
) -> Iterator[list[AnswerPrompt]]:  # fmt: skip
    """Samples passages endlessly, and yields the prompts about each passage. Raises PromptError if all texts are empty.

    Args:
        texts: (document, its file or corpus). A document's weight in sampling is the square root of its length, so that
            long documents do not crowd out short ones.
        passage_tokens: shortest and longest passage, with 4 characters counted as a token; lengths are log-uniform.
        per_passage: largest number of prompts about a passage.
        temperatures: temperatures of answers; the prompts of a passage take them in turn.
    """
    if not any(text.strip() for text, _ in texts):
        raise PromptError("There is no text to ask about: give files whose rows have `text`.")
    rng = random.Random(seed)
    weights = list(accumulate(len(text) ** 0.5 for text, _ in texts))

    def sample_passage(num_chars: int) -> tuple[str, str]:
        ((text, source),) = rng.choices(texts, cum_weights=weights)
        start = rng.randrange(max(1, len(text) - num_chars))
        return text[start : start + num_chars].strip(), source

    while True:
        low, high = passage_tokens
        passage, source = sample_passage(int(4 * low * (high / low) ** rng.random()))
        if rng.random() < FREE_PROMPT_SHARE:
            # A topic is one to four words of 120 characters of a text. The first word is skipped: it may be cut off.
            topics = (" ".join(sample_passage(120)[0].split()[1 : 1 + rng.randint(1, 4)]) for _ in range(per_passage))
            topics = (topic.strip(".,;:!?\"'()") for topic in topics if topic)
            prompts = [(rng.choice(PROMPTS["free"]).replace("{}", topic), "free") for topic in topics]
        elif passage:
            opening = rng.choice(PROMPTS["openings"])
            questions = _sample_questions(passage, per_passage, rng)
            prompts = [(opening + passage + question, kind) for question, kind in questions]
        else:
            continue
        if prompts:
            with_temperature = zip(prompts, cycle(temperatures), strict=False)
            yield [AnswerPrompt(prompt, temperature, kind, source) for (prompt, kind), temperature in with_temperature]


def _sample_questions(passage: str, num_questions: int, rng: random.Random) -> list[tuple[str, str]]:
    """Samples (question, kind) pairs that suit the passage: a transcript, code or prose."""
    # Kind -> number of questions that suit the passage, the first ones in PROMPTS; None: all of the kind.
    kinds: dict[str, int | None] = {"summary": None, "question": None, "task": None}
    # A transcript has many short turns, each with the speaker's name and a colon: here one for every 600 characters.
    if passage.count(" :") + passage.count(": ") > len(passage) / 600:
        kinds = {"meeting": None, "summary": None, "question": 6}
    # Code has a line that begins with a keyword for every 200 characters.
    if len(CODE_LINE.findall(passage)) > len(passage) / 200:
        kinds = {"code": None, "question": 2}
    questions = [(question, kind) for kind, limit in kinds.items() for question in PROMPTS[kind][:limit]]
    return rng.sample(questions, min(num_questions, len(questions)))


class AnswerFile:
    """A JSONL file of answers, to which each answer is appended as it arrives. A file of an earlier run is continued.
    Raises CheckpointError, without changing the file, if the file cannot be read or holds other rows than answers.

    A row has these keys:

        messages: the prompt and the answer, with ``reasoning_content`` if the server separates it.
        cut: true if the answer reached max_new_tokens.
        usage: [prompt tokens, completion tokens], as the server reports.
        temperature, source, kind: the prompt's fields.
        at: [index of the passage, index of the prompt, number of prompts of the passage].

    Attributes:
        answered: (index of the passage, index of the prompt) of each answer.
        usage: prompt and completion tokens that the server reports, summed over all answers.
        new_tokens: number of completion tokens of this run.
        num_refused: number of prompts of this run without an answer.
    """

    def __init__(self, path: Path) -> None:
        self.answered, self.usage, self.new_tokens, self.num_refused = set[tuple[int, int]](), [0, 0], 0, 0
        self.path, self._file = path, JsonLines(path, lambda line_number, row: self._count(row))

    def append(self, row: AnswerRow) -> None:
        """Appends an answer, and drops an incomplete last line of a killed run. Raises CheckpointError."""
        self._file.append(row)
        self._count(row)
        self.new_tokens += row["usage"][1]

    def _count(self, row: AnswerRow) -> None:
        """Adds a row to ``answered`` and ``usage``."""
        passage, prompt, _ = row["at"]
        self.answered.add((passage, prompt))
        self.usage = [a + b for a, b in zip(self.usage, row["usage"], strict=True)]

    @property
    def num_answers(self) -> int:
        """The number of answers in the file."""
        return self._file.num_lines


def generate_answers(
    prompts: Iterator[list[AnswerPrompt]], file: AnswerFile, url: str, api_key: str = "", model: str | None = None, *,
    rows: int, batch: int, max_new_tokens: int, template: Mapping[str, Any] | None = None,
    progress: Callable[[], None] = lambda: None, stop: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Has a server answer the prompts that have no answer in the file, and appends each answer as it arrives.

    Args:
        prompts: for each passage, the prompts about the passage.
        url: the server's address, with or without ``/v1``.
        model: the model's name at the server; None: the first model that the server lists.
        rows: total number of answers in the file, after which the run ends.
        batch: number of requests in flight.
        template: ``chat_template_kwargs`` for the server, stored in the answers' rows too.
        progress: called after each answer.
        stop: called a few times a second; if it returns True, the run ends, and requests in flight are lost.

    Raises:
        CapabilityError: the package openai is missing, or the server is unreachable, fails, or lacks OpenAI's API.
        PromptError: the server refuses many prompts in a row.
        CheckpointError: the file cannot be written.
    """
    with needs_extra("train", "--url needs the package openai"):
        from openai import APIError, AsyncOpenAI, BadRequestError, UnprocessableEntityError
    address = url.rstrip("/").removesuffix("/v1") + "/v1"
    resume_hint = f"The answers in {file.path} are kept; the same command continues from there."
    unanswered = (  # (``at`` of the row, prompt)
        ([passage, i, len(group)], prompt)
        for passage, group in enumerate(prompts)
        for i, prompt in enumerate(group)
        if (passage, i) not in file.answered
    )

    async def answer(client: AsyncOpenAI, name: str, row_at: list[int], prompt: AnswerPrompt) -> AnswerRow | str:
        """Returns the row of a prompt's answer, or the reason why the server gave no answer.

        ``row_at``: the row's ``at``. ``name``: the model's name at the server.
        """
        question = {"role": "user", "content": prompt.text}
        settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": prompt.temperature}
        settings |= {"extra_body": {"chat_template_kwargs": template}} if template else {}
        try:
            reply: Any = await client.chat.completions.create(model=name, messages=[question], **settings)  # type: ignore[list-item]
        except (BadRequestError, UnprocessableEntityError) as error:
            return reason_of(error)
        if not isinstance(getattr(reply, "choices", None), list) or not reply.choices:
            raise CapabilityError(f"{url} does not answer as OpenAI's API does: check the address. {resume_hint}")
        choice, usage = reply.choices[0], reply.usage
        message = {"content": choice.message.content or ""}
        # Servers differ in the key of reasoning.
        reasoning = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
        message |= {"reasoning_content": reasoning} if reasoning else {}
        if not "".join(message.values()).strip():
            return "no text"
        return {
            "messages": [question, {"role": "assistant", **message}],
            **({"chat_template_kwargs": template} if template else {}),
            "cut": choice.finish_reason == "length",
            "usage": [0, 0] if usage is None else [usage.prompt_tokens, usage.completion_tokens],
            "temperature": prompt.temperature,
            "source": prompt.source,
            "kind": prompt.kind,
            "at": row_at,
        }

    async def run() -> None:
        in_flight, refused_in_a_row = set[asyncio.Task[AnswerRow | str]](), 0
        async with AsyncOpenAI(
            base_url=address, api_key=api_key or "none", max_retries=RETRIES, timeout=_REQUEST_TIMEOUT
        ) as client:
            name = model
            if name is None:
                models = await client.models.list()
                if not models.data:
                    raise CapabilityError(f"{url} lists no model: name one with --target.")
                name = models.data[0].id
            try:
                while not stop():
                    while len(in_flight) < min(batch, rows - file.num_answers) and (item := next(unanswered, None)):
                        in_flight.add(asyncio.create_task(answer(client, name, *item)))
                    if not in_flight:
                        break
                    done, in_flight = await asyncio.wait(
                        in_flight, timeout=_POLL_INTERVAL, return_when=asyncio.FIRST_COMPLETED
                    )
                    # ``result`` raises if the task failed. Failed tasks come last, so that answers are written first.
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        if not isinstance(result := task.result(), str):
                            file.append(result)
                            refused_in_a_row = 0
                            progress()
                            continue
                        file.num_refused, refused_in_a_row = file.num_refused + 1, refused_in_a_row + 1
                        if refused_in_a_row == MAX_REFUSALS:
                            why = f"{MAX_REFUSALS} prompts in a row got no answer ({result})"
                            raise PromptError(f"{why}: shorten passages. {resume_hint}")
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
        raise CapabilityError(f"{url} cannot be reached any more: {why}. {resume_hint}") from error
