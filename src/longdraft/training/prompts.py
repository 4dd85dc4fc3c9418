"""Prompts to make a target talk: passages of documents, each with a few instructions.

A draft learns best what its target says by itself, and the domain matters more than anything: a draft trained on
plain text does poorly on answers. So the target answers these prompts, and the draft learns its answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longdraft.errors import PromptError

# {} is the passage. Those that end alike up to the passage's end share its KV when asked one after the other.
BEHIND = (
    "{}\n\nSummarize the text above.",
    "{}\n\nWrite a short report on this text.",
    "{}\n\nList the key points.",
    "{}\n\nWhat is this text about?",
    "{}\n\nWho and what is mentioned here, and why does it matter?",
    "{}\n\nExplain the main ideas of this text in simple words.",
    "{}\n\nGive a title and a detailed summary.",
    "{}\n\nWhat happens in this text? Answer in detail.",
    "{}\n\nContinue the text.",
    "{}\n\nWrite a one-page executive summary for someone who has not read it.",
    "{}\n\nWhat are the most important facts, and what follows from them?",
)
BEFORE = (
    "Summarize the following text.\n\n{}",
    "Summarize the following text into a summary of less than 800 words.\n### Text:\n\n{}\n\n### Summary:\n\n",
    "Write a one-page summary of this report.\n\nReport:\n{}\n\nSummary:",
    "Read the following passage and answer: what are its main points?\n\n{}",
    "Here is part of a book. Tell what it says in your own words.\n\n{}",
    "Write a detailed summary of the document below.\n\nDocument:\n{}",
)
MEETING = (
    "{}\n\nSummarize the whole meeting.",
    "{}\n\nWhat did the participants discuss, and what did they decide?",
    "{}\n\nWhat were the main discussion points?",
    "{}\n\nWho said what? Give the opinions of the participants.",
    "{}\n\nSummarize the discussion.",
)


@dataclass(frozen=True)
class Ask:
    """One prompt: an instruction around a passage, and the temperature of its answer."""

    text: str
    temperature: float


def asks(
    texts: Sequence[str], tokens: tuple[int, int], per_passage: int, temperatures: Sequence[float], seed: int
) -> Iterator[list[Ask]]:
    """Passages without end, each with at most ``per_passage`` prompts that begin alike.

    Args:
        texts: the documents; a long one is visited more often, by the square root of its length.
        tokens: shortest and longest passage, in tokens (four characters each); lengths are log-uniform.
        temperatures: of the answers, one after the other.

    Raises:
        PromptError: no document has any text.
    """
    if not any(text.strip() for text in texts):
        raise PromptError("There is no text to ask about: rows need `text`.")
    rng = random.Random(seed)
    weights = [len(text) ** 0.5 for text in texts]
    while True:
        text = rng.choices(texts, weights)[0]
        low, high = tokens
        length = int(4 * low * (high / low) ** rng.random())
        start = rng.randrange(max(1, len(text) - length))
        passage = text[start : start + length].strip()
        if not passage:
            continue
        if rng.random() < 0.4:
            templates = [rng.choice(BEFORE)] * per_passage
        else:
            # A transcript: many short turns, each with its speaker.
            kinds = MEETING if passage.count(" :") + passage.count(": ") > length / 150 else BEHIND
            templates = rng.sample(kinds, min(per_passage, len(kinds)))
        yield [Ask(t.replace("{}", passage), temperatures[i % len(temperatures)]) for i, t in enumerate(templates)]
