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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedTokenizerBase

from longdraft.bench import data
from longdraft.bench.data import Sample
from longdraft.bench.prompts import Prompt
from longdraft.bench.tables import mean_of
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts.draft import Draft
from longdraft.engine import sequence
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.engine.verifier import Verifier, VerifyOutput
from longdraft.errors import PromptError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.methods import get_method
from longdraft.model.chat import encode
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner
from longdraft.recipes import Recipe, recipe_for, resolve
from longdraft.trees.kind import TreeConfig
from longdraft.trees.level import DraftLogits, TreeLevel
from longdraft.trees.tree import TokenTree

# The answer begins with the sentence's own words, so most of the code is written after the first rounds.
NEEDLE = "The secret code of the {colour} door is {code}."
QUESTION = "What is the secret code of the {colour} door?"
COLOURS = ("blue", "red", "green", "yellow", "white", "black")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# A haystack may be so many tokens shorter than what was asked for.
SLACK = 16


def make_haystacks(
    path: Path,
    context: int,
    tokenizer: PreTrainedTokenizerBase,
    samples: int = 2,
    depths: Sequence[float] = DEPTHS,
    **asked: Any,
) -> list[Prompt]:
    """Prompts with a needle; those of one text stand together, the deepest first: each shares its beginning with the
    next.

    Args:
        path: JSONL as for the bench, or plain text.
        context: tokens of a prompt.
        samples: texts, each with a needle at each depth. depths: 0 at the beginning, 1 at the end.
        asked: ``system`` and arguments of the chat template.

    Raises:
        PromptError: the file cannot be read, or its text is too short.
        ContextError: the context leaves no room for text.
    """
    # A token is seldom longer than 16 characters; more text than that is not read.
    ids = encode(tokenizer, data.read_document(path)[: 16 * context * samples])
    step = max(0, min(context, (len(ids) - context) // max(1, samples - 1)))
    made = []
    for i in range(samples):
        hay = str(tokenizer.decode(ids[i * step : i * step + context], skip_special_tokens=True))
        for depth in sorted(set(depths), reverse=True):
            generator = random.Random(f"{i} {depth}")
            colour, code = generator.choice(COLOURS), str(generator.randrange(10000, 100000))
            needles, question = ((depth, NEEDLE.format(colour=colour, code=code)),), QUESTION.format(colour=colour)
            sample = Sample(hay, question, "needle", f"{path}:{i + 1}", answers=(code,), needles=needles)
            tokens = data.encode_truncated(sample, tokenizer, context, **asked)
            if len(tokens) < context - SLACK:
                raise PromptError(
                    f"{path} holds {len(ids):,} tokens, and a haystack has {context:,}: name a longer text."
                )
            made.append(Prompt(sample, tuple(tokens), context))
    return made


# Logits (V,) of the next token, and (V,) the target's ids that they are of; None: the target's vocabulary.
Prediction = tuple[torch.Tensor, torch.Tensor | None]


class TokenPrediction(NamedTuple):
    """A view's prediction of one token of a needle.

    Attributes:
        right: the token is the view's first choice.
        logprob: its log-probability by the view; None if the view's vocabulary lacks it.
    """

    is_top1: bool
    logprob: float | None


class NeedleBench:
    """The measurement on one loaded model.

    Args:
        views: by name, the method whose drafter it is, and options.
        drafts: trained drafts by kind; one that is missing is looked for in the package.

    Raises:
        CapabilityError: a view's draft is missing.
        CheckpointError: a draft was made for another target.
        ValueError: a value that a drafter cannot use.
    """

    def __init__(
        self, loaded: LoadedModel, views: Mapping[str, tuple[str, Mapping[str, Any]]], drafts: Mapping[str, Draft[Any]]
    ) -> None:
        self.runner = TargetRunner(loaded.model)
        self._tokenizer = loaded.tokenizer
        self._recipes: dict[str, Recipe] = {}
        read = dict(drafts)
        for name, (method, given) in views.items():
            kind = get_method(method).draft_kind or ""
            # Nothing is verified, so the first choice is all the tree that is needed.
            options = {**({"draft": read[kind]} if kind in read else {}), **given, "widths": (1,)}
            recipe = self._recipes[name] = recipe_for(*resolve(method, options), self.runner)
            if "draft" in recipe.options:
                read[kind] = recipe.options["draft"]  # it is not read twice
        layers = (recipe.drafter().feature_layers(self.runner) for recipe in self._recipes.values())
        self._cache = PromptCache(next(filter(None, layers), ()))  # with the hidden states that any drafter reads

    @property
    def max_haystack_tokens(self) -> int:
        """Tokens of the longest haystack behind which the target's context has room for any needle."""
        longest = max(len(encode(self._tokenizer, NEEDLE.format(colour=c, code=10**5))) for c in COLOURS)
        return self.runner.context_length - longest - 2

    def measure(
        self, haystack: Prompt, tick: Callable[[str], None] = lambda name: None
    ) -> dict[str, list[TokenPrediction]]:
        """Asks every view for a haystack's needle.

        Args:
            tick: called before each view with its name.

        Returns:
            By view, what it says of each token of the needle but the first.

        Raises:
            ContextError: haystack and needle exceed the target's context.
        """
        answer = self.needle_tokens(haystack)
        tokens: dict[str, list[TokenPrediction]] = {}
        for name, recipe in self._recipes.items():
            tick(name)
            drafter, tree, forced = recipe.drafter(), _FirstChoice(), _Forced(answer)
            cast(TreeDrafter, drafter).tree = tree
            # One more than is emitted, or nothing would be drafted for the last one.
            prompt, length = list(haystack.token_ids), len(answer) + 1
            engine = Engine(self.runner, drafter, _RootsAlone(), self._cache)
            engine.add(
                sequence.Sequence(0, prompt, length, self.runner.device, sampler=forced, stop_rules=[forced.over])
            )
            for _ in engine.run():
                pass
            tokens[name] = [_judged(*row, token) for row, token in zip(tree.predictions, answer[1:], strict=True)]
        return tokens

    def needle_tokens(self, haystack: Prompt) -> list[int]:
        """The needle as an answer, without its full stop."""
        ((_, needle),) = haystack.sample.needles
        return encode(self._tokenizer, needle.rstrip("."))


class _Forced(Sampler):
    """Returns the tokens of an answer, whatever the target would have sampled."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(False, Sampling().processors())
        self._answer, self._given = answer, 0

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        self._given += 1
        return self._answer[self._given - 1]

    def over(self, written: sequence.Sequence) -> sequence.FinishReason | None:
        """A rule: the answer is complete."""
        return "length" if len(written.output) == len(self._answer) else None


class _RootsAlone(Verifier):
    """Verifies no draft: every token is one that a drafter is asked for."""

    def verify(self, sequences: list[sequence.Sequence], trees: list[TokenTree]) -> list[VerifyOutput]:
        return super().verify(sequences, [TokenTree(tree.tokens[:1], (-1,)) for tree in trees])


@dataclass(frozen=True, kw_only=True)
class _FirstChoice(TreeConfig):
    """A tree of the first choice alone, which keeps the logits of that choice."""

    name: str = "chain"
    branching: tuple[int, ...] = (1,)
    predictions: list[Prediction] = field(default_factory=list)

    def grow(self, roots: Sequence[int], draft_logits: DraftLogits, *args: Any, **drafts: Any) -> list[TokenTree]:
        ids = args[1] if len(args) > 1 else None

        def kept(level: TreeLevel) -> torch.Tensor:
            logits = draft_logits(level)
            self.predictions.extend((row, ids) for row in logits[:, 0])
            return logits

        return super().grow(roots, kept, *args, **drafts | {"draft_topk": None})


def _judged(logits: torch.Tensor, ids: torch.Tensor | None, token: int) -> TokenPrediction:
    """Judges a target's token by a draft's logits; ``ids`` are the target ids of the draft's vocabulary."""
    at = [token] if ids is None else (ids == token).nonzero().flatten().tolist()
    if not at or at[0] >= len(logits):
        return TokenPrediction(False, None)
    logprobs = torch.log_softmax(logits.float(), -1)
    logprob = float(logprobs[at[0]])
    # A draft that has overflowed foresees nothing.
    return TokenPrediction(int(logprobs.argmax()) == at[0], logprob if math.isfinite(logprob) else None)


def accuracy(tokens: Sequence[TokenPrediction]) -> float | None:
    return mean_of(float(token.is_top1) for token in tokens)


def perplexity(tokens: Sequence[TokenPrediction]) -> float | None:
    """The perplexity of the tokens that the vocabulary has; None without such tokens, or if it overflows."""
    surprise = mean_of(None if token.logprob is None else -token.logprob for token in tokens)
    try:
        return None if surprise is None else math.exp(surprise)
    except OverflowError:
        return None
