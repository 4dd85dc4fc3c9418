"""Measures how well drafters predict a needle, by the part of the text they see (SpecExtend, section 2.2, table 1).

A sentence with a code lies somewhere in a long text. It is fed token by token, as if the target had answered with it,
so that all views predict the same tokens after the same text. For each token but the first (the prefill's) the drafter
proposes as in decoding, and the probability that it gives to the true token is kept. The engine does all else: the
target reads each token in a forward of its own, whose attention a retrieval uses as ever.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from longdraft.bench import data
from longdraft.bench.data import Sample
from longdraft.bench.prompts import Prompt
from longdraft.bench.tables import Report, circumstances, count, grouped, mean_of, table
from longdraft.drafters.autoregressive import NoDrafter
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts.draft import Draft
from longdraft.engine import sequence
from longdraft.engine.drafter import Drafter
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.engine.schedule import Schedule, Verified
from longdraft.errors import ContextError, PromptError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.memory.token_ids import common_prefix
from longdraft.methods import method_named
from longdraft.model.chat import encode
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner
from longdraft.recipes import Recipe, recipe_for, resolve
from longdraft.trees.kind import TreeKind
from longdraft.trees.level import Growth, Level, Scored
from longdraft.trees.tree import TokenTree

# The answer begins with the sentence's own words, so most of the code is written after the first rounds.
NEEDLE = "The secret code of the {colour} door is {code}."
QUESTION = "What is the secret code of the {colour} door?"
COLOURS = ("blue", "red", "green", "yellow", "white", "black")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# A haystack may be so many tokens shorter than what was asked for.
SLACK = 16


def checked(depths: Sequence[float], samples: int) -> None:
    """Raises ValueError for depths, or a number of texts, that make no haystacks."""
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"needle-depths must lie between 0 and 1, got {', '.join(map(str, depths))}")
    if samples < 1:
        raise ValueError(f"needle-samples must be at least 1, got {samples}")


def haystacks(
    path: Path,
    context: int,
    tokenizer: PreTrainedTokenizerBase,
    depths: Sequence[float] = DEPTHS,
    samples: int = 2,
    **asked: Any,
) -> list[Prompt]:
    """Prompts with a needle; those of one text stand together, the deepest first: each shares its beginning with the
    next.

    Args:
        path: JSONL as for the bench, or plain text.
        context: tokens of a prompt.
        depths: where needles lie, 0 at the beginning, 1 at the end. samples: texts, each with a needle at each depth.
        asked: ``system`` and arguments of the chat template.

    Raises:
        PromptError: the file cannot be read, or its text is too short.
        ContextError: the context leaves no room for text.
    """
    # A token is seldom longer than 16 characters; more text than that is not read.
    ids = encode(tokenizer, data.text(path)[: 16 * context * samples])
    step = max(0, min(context, (len(ids) - context) // max(1, samples - 1)))
    made = []
    for i in range(samples):
        hay = str(tokenizer.decode(ids[i * step : i * step + context], skip_special_tokens=True))
        for depth in sorted(set(depths), reverse=True):
            generator = random.Random(f"{i} {depth}")
            colour, code = generator.choice(COLOURS), str(generator.randrange(10000, 100000))
            needles, question = ((depth, NEEDLE.format(colour=colour, code=code)),), QUESTION.format(colour=colour)
            sample = Sample(hay, question, "needle", f"{path}:{i + 1}", answers=(code,), needles=needles)
            tokens = data.fitted(sample, tokenizer, context, **asked)
            if len(tokens) < context - SLACK:
                raise PromptError(
                    f"{path} holds {len(ids):,} tokens, too few for a haystack of {context:,}: lower --needle-context, "
                    "or name a longer text."
                )
            made.append(Prompt(sample, tuple(tokens), context))
    return made


def depth_of(haystack: Prompt) -> float:
    """Where the needle of a haystack lies."""
    ((depth, _),) = haystack.sample.needles
    return depth


# Logits (V,) of the next token, and (V,) the target's ids that they are of; None: the target's vocabulary.
Prediction = tuple[torch.Tensor, torch.Tensor | None]

# The target on all of its KV: the upper bound of a drafter. Always measured.
TARGET = "target"
# Short names for the views of a small language model.
SMALL = {view: ("small-lm", {"view": view}) for view in ("full", "streaming", "retrieval")}
# The target on the KV that it retrieves (Sun et al. 2024, TriForce, section 4.1).
RETRIEVED = "target-retrieval"
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    **SMALL, RETRIEVED: ("self", {"view": "chunks", "budget": 1184, "sink": 32, "window": 128})
}  # fmt: skip
DEFINITIONS = (
    "accuracy: tokens of the needle, the first excepted, that are the view's first choice given all before them.",
    "perplexity: exp of the mean negative log-likelihood the view gives them, but for those that its vocabulary lacks.",
    f"code: the same of the code's tokens alone. {TARGET}: the target on its full KV, which drafts nothing.",
)
FIGURES = ("accuracy", "perplexity", "code_accuracy", "code_perplexity")
_TREES = frozenset({"widths", "nodes", "tree", "depth", "top_k", "threshold"})


@dataclass(frozen=True)
class View:
    """A drafter with its options.

    Attributes:
        name: as the user wrote it. method: the method whose drafter it is; None for the target.
    """

    name: str
    method: str | None
    options: Mapping[str, Any]


def view(name: str, options: Mapping[str, Any]) -> View:
    """A view from its name, one of :data:`NAMED` or a method's, and further options.

    Raises:
        UnknownMethodError: no such view or method.
        ValueError: a method that drafts without probabilities, or an option that it does not have.
    """
    written = ":".join([name, *(f"{key}={value}" for key, value in options.items())])
    method, own = NAMED.get(name, (name, {}))
    known = method_named(method)
    if not known.needs_draft and name not in NAMED:
        raise ValueError(
            f"{name} is no view: name {', '.join(NAMED)}, or a method with a trained draft, such as "
            "longspec, longspec:retrieval=true or eagle3"
        )
    known.checked({**own, **options})
    if shapes := sorted(_TREES & set(options)):
        raise ValueError(f"{', '.join(shapes)}: only a draft's first choice counts here, whatever the tree")
    return View(written, method, {**own, **options})


class Foreseen(NamedTuple):
    """A view's prediction of one token of a needle.

    Attributes:
        right: the token is the view's first choice.
        log_prob: its log-probability by the view; None if the view's vocabulary lacks it.
        code: it belongs to the code, which the rest of the sentence does not give away.
    """

    right: bool
    log_prob: float | None
    code: bool


class NeedleDrafts:
    """The measurement on one loaded model.

    Args:
        views: the views to measure beside the target.
        drafts: trained drafts by kind; one that is missing is looked for in the package.

    Raises:
        CapabilityError: a view's draft is missing.
        CheckpointError: a draft was made for another target.
        ValueError: a value that a drafter cannot use.
    """

    def __init__(self, loaded: LoadedModel, views: Sequence[View], drafts: Mapping[str, Draft[Any]]) -> None:
        self.runner = TargetRunner(loaded.model)
        self._tokenizer = loaded.tokenizer
        self._views = {each.name: each for each in (View(TARGET, None, {}), *views)}
        self._recipes: dict[str, Recipe] = {}
        read = dict(drafts)
        for name, each in self._views.items():
            if each.method is None:
                continue
            kind = method_named(each.method).draft_kind or ""
            given = {"draft": read[kind]} if kind in read else {}
            # Nothing is verified, so the first choice is all the tree that is needed.
            options = {**given, **each.options, "widths": (1,)}
            recipe = self._recipes[name] = recipe_for(*resolve(each.method, options), self.runner)
            if "draft" in recipe.options:
                read[kind] = recipe.options["draft"]  # it is not read twice
        layers = (recipe.drafter().feature_layers(self.runner) for recipe in self._recipes.values())
        self._cache = PromptCache(next(filter(None, layers), ()))  # with the hidden states that any drafter reads

    @property
    def names(self) -> list[str]:
        """The views, the target first."""
        return list(self._views)

    def contexts(self, asked: Sequence[int]) -> list[int]:
        """Tokens of the haystacks, so that they and a needle fit the target's context.

        Raises:
            ContextError: more is asked for than the context holds.
        """
        limit = self.runner.context_length
        if (longest := max(asked)) > limit:
            raise ContextError(
                f"A haystack of {longest:,} tokens is longer than the model's context of {limit:,}: lower "
                "--needle-context, or stretch the context with --rope-factor (YaRN)."
            )
        room = max(len(encode(self._tokenizer, NEEDLE.format(colour=c, code=10**5))) for c in COLOURS) + 2
        return list(dict.fromkeys(min(length, limit - room) for length in asked))

    def measure(self, haystack: Prompt, tick: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
        """Asks every view for a haystack's needle.

        Args:
            tick: called before each view with its name.

        Returns:
            An object for JSON: the haystack's length and depth, and ``tokens`` by view, a :class:`Foreseen` for each
            token of the needle but the first.

        Raises:
            ContextError: haystack and needle exceed the target's context.
        """
        answer, code = self.answer(haystack)
        tokens: dict[str, list[Foreseen]] = {}
        for name in self.names:
            tick(name)
            drafter: Drafter = NoDrafter()
            tree, forced = _FirstChoice(), _Forced(answer)
            if name != TARGET:
                drafter = self._recipes[name].drafter()
                cast(TreeDrafter, drafter).tree = tree
            # One more than is emitted, or nothing would be drafted for the last one.
            prompt, length = list(haystack.tokens), len(answer) + 1
            engine = Engine(self.runner, drafter, _RootsAlone(), self._cache)
            engine.add(sequence.Sequence(0, prompt, length, self.runner.device, sampler=forced, rules=[forced.over]))
            for _ in engine.run():
                pass
            rows = forced.predictions[1:] if name == TARGET else tree.predictions
            judged = zip(rows, answer[1:], range(1, len(answer)), strict=True)
            tokens[name] = [_judged(*row, token, at >= code) for row, token, at in judged]
        about = {"context": haystack.context, "context_tokens": len(haystack.tokens), "depth": depth_of(haystack)}
        return {**about, "tokens": tokens}

    def report(self, measured: Sequence[Mapping[str, Any]], complete: bool = True) -> Report:
        """The report of haystacks that views were asked for; keys are those that docs/figures.md defines."""
        rows = [_row(name, own) for own in grouped(measured, "context") for name in self.names]
        tables = []
        for own in grouped(rows, "context"):
            heads = [*(key.replace("_", " ") for key in FIGURES), *(f"at {at['depth']:g}" for at in own[0]["by_depth"])]
            made = table(["view"], [*heads, "not in vocabulary"])
            for row in own:
                figures = [*(row[key] for key in FIGURES), *(each["accuracy"] for each in row["by_depth"])]
                made.add_row(Text(row["view"]), *map(_figure, figures), str(row["lacking"]))
            of = f"{count(own[0]['haystacks'], 'haystack')} of {own[0]['context_tokens']:,} tokens"
            tables.append((f"{of}, {own[0]['tokens']} tokens of needles", made))
        document = {"rows": rows, **circumstances(), "complete": complete}
        return Report(document, tables, definitions=DEFINITIONS, name="longdraft bench needle")

    def answer(self, haystack: Prompt) -> tuple[list[int], int]:
        """The needle as an answer, without its full stop, and which of its tokens is the code's first."""
        ((_, needle),) = haystack.sample.needles
        sentence, (code,) = needle.rstrip("."), haystack.sample.answers
        tokens = encode(self._tokenizer, sentence)
        # A token may hold the code's beginning and the space before it: the tokens that both texts share end before it.
        return tokens, common_prefix(tokens, encode(self._tokenizer, sentence.removesuffix(code)))


class _Forced(Sampler):
    """Returns the tokens of an answer, and keeps the logits that the target would have sampled from."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(False, Sampling().processors())
        self.answer = answer
        self.predictions: list[Prediction] = []

    def sample(self, text: torch.Tensor, logits: torch.Tensor) -> int:
        self.predictions.append((logits, None))
        return self.answer[len(self.predictions) - 1]

    def over(self, written: sequence.Sequence) -> sequence.FinishReason | None:
        """A rule: the answer is complete."""
        return "length" if len(written.output) == len(self.answer) else None


class _RootsAlone(Schedule):
    """Verifies no draft: every token is one that a drafter is asked for."""

    def verify(self, sequences: list[sequence.Sequence], trees: list[TokenTree]) -> list[Verified]:
        return super().verify(sequences, [TokenTree(tree.tokens[:1], (-1,)) for tree in trees])


@dataclass(frozen=True, kw_only=True)
class _FirstChoice(TreeKind):
    """A tree of the first choice alone, which keeps the logits of that choice."""

    name: str = "chain"
    children: tuple[int, ...] = (1,)
    predictions: list[Prediction] = field(default_factory=list)

    def levels(self, growth: Growth, roots: Scored) -> list[Scored]:
        def expand(level: Level) -> torch.Tensor:
            logits = growth.expand(level)
            self.predictions.extend((row, growth.ids) for row in logits[:, 0])
            return logits

        return super().levels(replace(growth, expand=expand, likeliest=None), roots)


def _judged(logits: torch.Tensor, ids: torch.Tensor | None, token: int, code: bool) -> Foreseen:
    """Judges a target's token by a draft's logits; ``ids`` are the target ids of the draft's vocabulary."""
    at = [token] if ids is None else (ids == token).nonzero().flatten().tolist()
    if not at or at[0] >= len(logits):
        return Foreseen(False, None, code)
    log_probs = torch.log_softmax(logits.float(), -1)
    log_prob = float(log_probs[at[0]])
    # A draft that has overflowed foresees nothing.
    return Foreseen(int(log_probs.argmax()) == at[0], log_prob if math.isfinite(log_prob) else None, code)


def _row(name: str, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    at: dict[float, list[Foreseen]] = {}
    for m in sorted(own, key=lambda m: m["depth"]):
        at.setdefault(m["depth"], []).extend(Foreseen(*token) for token in m["tokens"][name])
    tokens = [token for found in at.values() for token in found]
    code = [token for token in tokens if token.code]
    return {
        "view": name,
        "context": own[0]["context"],
        "context_tokens": round(median(m["context_tokens"] for m in own)),
        "haystacks": len(own),
        "tokens": len(tokens),
        "accuracy": accuracy(tokens),
        "perplexity": perplexity(tokens),
        "code_tokens": len(code),
        "code_accuracy": accuracy(code),
        "code_perplexity": perplexity(code),
        "lacking": sum(token.log_prob is None for token in tokens),
        "by_depth": [{"depth": depth, "accuracy": accuracy(found)} for depth, found in at.items()],
    }


def accuracy(tokens: Sequence[Foreseen]) -> float | None:
    return mean_of(float(token.right) for token in tokens)


def perplexity(tokens: Sequence[Foreseen]) -> float | None:
    """The perplexity of the tokens that the vocabulary has; None without such tokens, or if it overflows."""
    surprise = mean_of(None if token.log_prob is None else -token.log_prob for token in tokens)
    try:
        return None if surprise is None else math.exp(surprise)
    except OverflowError:
        return None


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1000 else f"{value:.0e}"
