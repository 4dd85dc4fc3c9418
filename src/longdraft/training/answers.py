"""A target's answers as training text: prompts about passages of documents, and a server that answers them.

A draft learns best from the target's own answers; one that is trained on plain text does poorly on answers. Prompts
about a passage begin alike, up to its end, so that its KV is read once for all of them. The server is any that speaks
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

from longdraft.errors import CapabilityError, LongdraftError, PromptError, reason_of
from longdraft.json_lines import JsonLines

# Texts before a passage ("openings"); what is asked behind one, by kind; prompts without a passage ("free"), where {}
# is a few words taken from a text.
PROMPTS: dict[str, list[str]] = json.loads(files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
# Lines of programs.
CODE_LINE = re.compile(r"^\s*(def|class|import|from|return|if|for|#include|fn|let|pub|self\.)\b", re.M)
# Share of the passages that free prompts replace.
FREE_PROMPT_SHARE = 0.12
# After so many prompts in a row without an answer, nothing more is asked.
PATIENCE = 32
# How often a request is sent again, after 0.5, 1, 2, 4, 8, 8, ... seconds, while a server is away or busy.
RETRIES = 8
# Seconds for an answer, and between two looks at ``stop``.
_TIMEOUT, _LOOK = 3600.0, 0.2

Example = dict[str, Any]


@dataclass(frozen=True)
class AnswerPrompt:
    """A prompt.

    Attributes:
        temperature: of its answer.
        kind: what is asked for. source: the file or corpus that the passage is from.
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
    """An endless series of passages, each with at most ``per_passage`` prompts that begin alike.

    Args:
        texts: the documents, each with the file or corpus that it is from, and with a chance that grows with the square
            root of its length.
        tokens: shortest and longest passage, in tokens (four characters each); lengths are log-uniform.
        temperatures: temperatures of a passage's answers, repeated.

    Raises:
        PromptError: there is no text.
    """
    if not any(text.strip() for text, _ in texts):
        raise PromptError("There is no text to ask about: rows need `text`.")
    rng = random.Random(seed)
    weights = list(accumulate(len(text) ** 0.5 for text, _ in texts))

    def passage(length: int) -> tuple[str, str]:
        ((text, source),) = rng.choices(texts, cum_weights=weights)
        start = rng.randrange(max(1, len(text) - length))
        return text[start : start + length].strip(), source

    while True:
        low, high = passage_tokens
        about, source = passage(int(4 * low * (high / low) ** rng.random()))
        if rng.random() < FREE_PROMPT_SHARE:
            topics = (" ".join(passage(120)[0].split()[1 : 1 + rng.randint(1, 4)]) for _ in range(per_passage))
            asked = (rng.choice(PROMPTS["free"]).replace("{}", topic.strip(".,;:!?\"'()")) for topic in topics if topic)
            prompts = [(text, "free") for text in asked]
        elif about:
            opening = rng.choice(PROMPTS["openings"])
            prompts = [(opening + about + closing, kind) for closing, kind in _closings(about, per_passage, rng)]
        else:
            continue
        if prompts:
            each = zip(prompts, cycle(temperatures), strict=False)
            yield [AnswerPrompt(text, temperature, kind, source) for (text, kind), temperature in each]


def _closings(passage: str, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """The questions behind a passage, each with its kind."""
    kinds: dict[str, int | None] = {"summary": None, "question": None, "task": None}
    # A transcript has many short turns, each with its speaker.
    if passage.count(" :") + passage.count(": ") > len(passage) / 600:
        kinds = {"meeting": None, "summary": None, "question": 6}
    if len(CODE_LINE.findall(passage)) > len(passage) / 200:
        kinds = {"code": None, "question": 2}
    texts = [(text, kind) for kind, most in kinds.items() for text in PROMPTS[kind][:most]]
    return rng.sample(texts, min(count, len(texts)))


class AnswerFile:
    """A JSONL file of answers, to which rows are appended as they come. What an earlier run has written is kept.

    A row holds ``messages`` (with ``reasoning_content`` if the server tells it apart), ``cut`` (the answer was longer
    than allowed), ``usage`` (tokens that the server reports to have read and written), ``temperature``, ``source``,
    ``kind`` (of the prompt), and ``at`` (its passage, its number there, and how many prompts the passage has).

    Attributes:
        answered: (passage, number) of each row.
        usage: tokens that the server reports to have read and written, for all answers.
        new_tokens: tokens of the answers that this run has added. refused: prompts without an answer.

    Raises:
        CheckpointError: the file cannot be read, or holds something else, so it must not be cut.
    """

    def __init__(self, path: Path) -> None:
        self.answered, self.usage, self.new_tokens, self.num_refused = set[tuple[int, int]](), [0, 0], 0, 0
        self.path, self._file = path, JsonLines(path, lambda number, row: self._count(row))

    def append(self, row: Example) -> None:
        """Writes a row at the end, where a torn one may have been. Raises CheckpointError if that fails."""
        self._file.append(row)
        self._count(row)
        self.new_tokens += row["usage"][1]

    def _count(self, row: Example) -> None:
        number, place, _ = row["at"]
        self.answered.add((number, place))
        self.usage = [a + b for a, b in zip(self.usage, row["usage"], strict=True)]

    @property
    def num_answers(self) -> int:
        """The number of rows in the file."""
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
    """Lets a server answer prompts, and appends a row for each answer as it comes.

    A killed run continues with the missing ones.

    Args:
        passages: the prompts about each passage.
        url: the server's address, with or without ``/v1``. key: sent as the bearer's token.
        model: which of its models answers; None: the first that it lists.
        rows: of the file in the end. batch: requests in flight.
        template: settings of the server's chat template (``chat_template_kwargs``), which the rows keep.
        progress: called whenever a row is written.
        stop: asked a few times a second; True ends the run, and answers on their way are lost.

    Raises:
        CapabilityError: the package openai is missing; the server cannot be reached, breaks off, or is another kind of
            server.
        PromptError: it refuses prompt after prompt.
        CheckpointError: the file cannot be written.
    """
    try:
        from openai import APIError, AsyncOpenAI, BadRequestError, UnprocessableEntityError
    except ImportError:
        raise CapabilityError('--url needs the package openai: pip install "longdraft[train]".') from None
    address = url.rstrip("/").removesuffix("/v1") + "/v1"
    kept = f"The answers in {file.path} are kept; the same command continues from there."
    # The prompts that have no row, each with its place.
    missing = (
        ([number, place, len(asks)], ask)
        for number, asks in enumerate(prompts)
        for place, ask in enumerate(asks)
        if (number, place) not in file.answered
    )

    async def row(client: AsyncOpenAI, name: str, at: list[int], ask: AnswerPrompt) -> Example | str:
        """The row of a prompt's answer; why there is none."""
        turn = {"role": "user", "content": ask.text}
        settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": ask.temperature}
        settings |= {"extra_body": {"chat_template_kwargs": template}} if template else {}
        try:
            reply: Any = await client.chat.completions.create(model=name, messages=[turn], **settings)  # type: ignore[list-item]
        except (BadRequestError, UnprocessableEntityError) as error:
            return reason_of(error)
        if not isinstance(getattr(reply, "choices", None), list) or not reply.choices:
            raise CapabilityError(f"{url} does not answer as OpenAI's API does. {kept}")
        choice, usage = reply.choices[0], reply.usage
        said = {"content": choice.message.content or ""}
        # vLLM and SGLang name a thought in one of two ways.
        thought = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
        said |= {"reasoning_content": thought} if thought else {}
        if not "".join(said.values()).strip():
            return "no text"
        return {
            "messages": [turn, {"role": "assistant", **said}],
            **({"chat_template_kwargs": template} if template else {}),
            "cut": choice.finish_reason == "length",
            "usage": [0, 0] if usage is None else [usage.prompt_tokens, usage.completion_tokens],
            "temperature": ask.temperature,
            "source": ask.source,
            "kind": ask.kind,
            "at": at,
        }

    async def run() -> None:
        flying, unanswered = set[asyncio.Task[Example | str]](), 0
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
                    while len(flying) < min(batch, rows - file.num_answers) and (following := next(missing, None)):
                        flying.add(asyncio.create_task(row(client, name, *following)))
                    if not flying:
                        break
                    landed, flying = await asyncio.wait(flying, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
                    # What came is kept, whatever else failed meanwhile.
                    for task in sorted(landed, key=lambda task: task.exception() is not None):
                        if not isinstance(found := task.result(), str):
                            file.append(found)
                            unanswered = 0
                            progress()
                            continue
                        file.num_refused, unanswered = file.num_refused + 1, unanswered + 1
                        if unanswered == PATIENCE:
                            why = f"{PATIENCE} prompts in a row got no answer ({found})"
                            raise PromptError(f"{why}: shorten passages. {kept}")
            finally:
                for task in flying:
                    task.cancel()
                await asyncio.gather(*flying, return_exceptions=True)

    try:
        asyncio.run(run())
    except LongdraftError:
        raise
    except (APIError, ValueError) as error:
        why = reason_of(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        raise CapabilityError(f"{url} cannot be asked any more: {why}. {kept}") from error
