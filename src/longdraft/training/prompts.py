"""Prompts for the target: passages of documents, each with many instructions.

A draft learns best from the target's own answers; one that is trained on plain text does poorly on answers. Prompts
about a passage begin alike, up to its end, so that its KV is read once for all of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from longdraft.errors import PromptError

# Texts before a passage.
OPENINGS = (
    "",
    "",
    "Read the following text.\n\n",
    "Here is part of a longer document.\n\n",
    "Summarize the following text into a summary of less than 800 words.\n### Text:\n\n",
    "You are given a report. Read it, then answer.\n\nReport:\n",
    "Text:\n",
    "I have a question about this:\n\n",
    "Write a one-page summary of this report.\n\nReport:\n",
    "Document:\n",
)
# Texts after it.
SUMMARIES = (
    "\n\nSummarize the text above.",
    "\n\n### Summary:\n\n",
    "\n\nSummary:",
    "\n\nNow, write a one-page summary of the report.\n\nSummary:",
    "\n\nWrite a short report on this text.",
    "\n\nList the key points.",
    "\n\nGive a title and a detailed summary.",
    "\n\nSummarize it in three sentences.",
    "\n\nSummarize it paragraph by paragraph.",
    "\n\nWrite a one-page executive summary for someone who has not read it.",
    "\n\nTL;DR:",
    "\n\nWrite an abstract of the text.",
)
QUESTIONS = (
    "\n\nWhat is this text about?",
    "\n\nWho and what is mentioned here, and why does it matter?",
    "\n\nExplain the main ideas of this text in simple words.",
    "\n\nWhat happens in this text? Answer in detail.",
    "\n\nWhat are the most important facts, and what follows from them?",
    "\n\nWhat does the author want to say? Quote the sentences that show it.",
    "\n\nWhich problem is described, and how is it solved?",
    "\n\nWhat are the causes and the effects of what is described?",
    "\n\nName three questions that this text answers, and answer them with quotes.",
    "\n\nWhat is the most surprising statement in the text? Quote it and explain it.",
    "\n\nWhen and where does this take place? Give the passages that say so.",
    "\n\nWhat can a reader learn from this?",
    "\n\nWhat would a critic say about this text?",
)
TASKS = (
    "\n\nRewrite the text in plain English.",
    "\n\nRewrite the first paragraph in your own words.",
    "\n\nRewrite the text as a letter to a friend.",
    "\n\nCorrect the spelling and grammar of the text.",
    "\n\nExtract all names of people, places and organizations as a list.",
    "\n\nExtract all dates and numbers, with what they refer to, as a table.",
    "\n\nExtract the key facts as JSON with the fields topic, people, places, facts.",
    "\n\nTurn the text into bullet points.",
    "\n\nWrite five quiz questions about the text, with answers.",
    "\n\nContinue the text.",
    "\n\nWrite a short story in which this happens.",
    "\n\nWrite a dialogue between two people who discuss this text.",
    "\n\nTurn this into a step-by-step guide.",
    "\n\nRepeat the first three sentences of the text, then say what they mean.",
    "\n\nWrite a blog post about this.",
    "\n\nDefine the most important terms used in the text.",
)
CODE = (
    "\n\nExplain what this code does.",
    "\n\nExplain this code line by line.",
    "\n\nWhich functions and classes are defined here? Say what each does.",
    "\n\nWrite documentation for this code.",
    "\n\nAdd comments to this code.",
    "\n\nWrite unit tests for this code.",
    "\n\nFind possible bugs in this code and show the corrected code.",
    "\n\nRewrite this code so that it is shorter and easier to read.",
    "\n\nShow the code of the most important function and explain it.",
    "\n\nWrite an example program that uses this code.",
    "\n\nAdd type hints to the functions.",
    "\n\nContinue the code.",
    "\n\nWhat are the arguments and return values of each function?",
    "\n\nRename the variables to longer names and show the result.",
)
MEETING = (
    "\n\nSummarize the whole meeting.",
    "\n\nWhat did the participants discuss, and what did they decide?",
    "\n\nWhat were the main discussion points?",
    "\n\nWho said what? Give the opinions of the participants.",
    "\n\nSummarize the discussion.",
    "\n\nWrite the minutes of the meeting.",
    "\n\nList the action items, with who is responsible.",
    "\n\nWhat did they disagree about? Quote what was said.",
    "\n\nWhat questions were asked, and how were they answered?",
    "\n\nWhat will happen next?",
)
# Prompts without a passage; {} is a few words taken from a text.
FREE = (
    "Write a short story about {}.",
    "Write a story for children in which {} plays a role.",
    "Explain {} to a beginner.",
    "List ten facts about {}.",
    "Write a poem about {}.",
    "What do you know about {}?",
    "Give me advice on {}.",
    "Write an essay on {}.",
    "Compare {} with something similar.",
    "Write a Python program that deals with {}.",
    "Write a letter to a company about {}.",
    "What are the advantages and disadvantages of {}?",
    "Make a plan in ten steps for learning about {}.",
    "Write an interview with an expert on {}.",
    "Invent a product named after {} and write its advertisement.",
    "Write a news article about {}.",
)
# What a user may say after an answer.
NEXT = (
    "Can you say that in more detail?",
    "Make it shorter.",
    "Give me an example.",
    "Why is that?",
    "Rewrite it as a list.",
    "What else should I know?",
    "Explain it again, for a child.",
    "Are you sure? Check it against the text.",
    "Write a conclusion.",
    "Thanks. What would you do next?",
)
# What is asked for, by kind, to count answers by.
KINDS = {
    text: kind
    for kind, texts in (
        ("summary", SUMMARIES), ("question", QUESTIONS), ("task", TASKS), ("code", CODE), ("meeting", MEETING),
    )
    for text in texts
}  # fmt: skip
# Lines of programs.
CODE_LINE = re.compile(r"^\s*(def|class|import|from|return|if|for|#include|fn|let|pub|self\.)\b", re.M)
# Share of the passages that free prompts replace, and share of the prompts that have another turn.
WITHOUT_PASSAGE, ANOTHER_TURN = 0.12, 0.15


@dataclass(frozen=True)
class Ask:
    """A prompt.

    Attributes:
        temperature: of its answer. then: what the user says after each answer.
        kind: what is asked for. source: the file or corpus that the passage is from.
    """

    text: str
    temperature: float
    then: tuple[str, ...] = ()
    kind: str = ""
    source: str = ""


def asks(
    texts: Sequence[str],
    tokens: tuple[int, int],
    per_passage: int,
    temperatures: Sequence[float],
    seed: int,
    sources: Sequence[str] = (),
) -> Iterator[list[Ask]]:
    """An endless series of passages, each with at most ``per_passage`` prompts that begin alike.

    Args:
        texts: the documents, each with a chance that grows with the square root of its length.
        tokens: shortest and longest passage, in tokens (four characters each); lengths are log-uniform.
        temperatures: temperatures of a passage's answers, repeated.
        sources: the file or corpus that each text is from.

    Raises:
        PromptError: there is no text.
    """
    if not any(text.strip() for text in texts):
        raise PromptError("There is no text to ask about: rows need `text`.")
    rng = random.Random(seed)
    weights = list(accumulate(len(text) ** 0.5 for text in texts))

    def passage(length: int) -> tuple[str, str]:
        (number,) = rng.choices(range(len(texts)), cum_weights=weights)
        text = texts[number]
        start = rng.randrange(max(1, len(text) - length))
        return text[start : start + length].strip(), sources[number] if sources else ""

    while True:
        low, high = tokens
        about, source = passage(int(4 * low * (high / low) ** rng.random()))
        if rng.random() < WITHOUT_PASSAGE:
            topics = (" ".join(passage(120)[0].split()[1 : 1 + rng.randint(1, 4)]) for _ in range(per_passage))
            prompts = [
                (rng.choice(FREE).replace("{}", topic.strip(".,;:!?\"'()")), "free") for topic in topics if topic
            ]
        elif about:
            opening = rng.choice(OPENINGS)
            prompts = [(opening + about + closing, KINDS[closing]) for closing in _closings(about, per_passage, rng)]
        else:
            continue
        if prompts:
            yield [
                Ask(text, temperatures[i % len(temperatures)], _turns(rng), kind, source)
                for i, (text, kind) in enumerate(prompts)
            ]


def _closings(passage: str, count: int, rng: random.Random) -> list[str]:
    kinds: tuple[str, ...] = SUMMARIES + QUESTIONS + TASKS
    # A transcript has many short turns, each with its speaker.
    if passage.count(" :") + passage.count(": ") > len(passage) / 600:
        kinds = MEETING + SUMMARIES + QUESTIONS[:6]
    if len(CODE_LINE.findall(passage)) > len(passage) / 200:
        kinds = CODE + QUESTIONS[:2]
    return rng.sample(kinds, min(count, len(kinds)))


def _turns(rng: random.Random) -> tuple[str, ...]:
    return (rng.choice(NEXT),) if rng.random() < ANOTHER_TURN else ()
