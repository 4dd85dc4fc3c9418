"""Measures how well drafters predict a needle, by their view of the context (SpecExtend, section 2.2, table 1).

The needle is a sentence with a code, somewhere in a long text (the haystack). It is fed token by token (teacher
forcing), so all views predict the same tokens after the same context. Before each token but the first (the prefill's)
the drafter proposes as in decoding, and its log-probability of the true token is kept. The engine runs one target
forward a token, as retrieval chooses chunks by the attention of that forward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedTokenizerBase

from longdraft.bench import data
from longdraft.bench.data import Sample
from longdraft.bench.experiment import Tick
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
from longdraft.trees.level import DraftLogits, TreeLevel
from longdraft.trees.tree import TokenTree
from longdraft.trees.tree_config import TreeConfig

# The code is last in the sentence: most of its tokens come when the drafter's view has been chosen a few times.
NEEDLE = "The secret code of the {colour} door is {code}."
QUESTION = "What is the secret code of the {colour} door?"
COLOURS = ("blue", "red", "green", "yellow", "white", "black")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SLACK = 16  # A haystack may be so many tokens shorter than the context.


def make_haystacks(
    path: Path, context: int, tokenizer: PreTrainedTokenizerBase, samples: int = 2,
    depths: Sequence[float] = DEPTHS, **template_kwargs: Any,
) -> list[Prompt]:  # fmt: skip
    """Prompts with a needle: text by text, deepest needle first, so that each prompt shares a prefix with the next.

    Args:
        path: a JSONL file of prompts, or plain text.
        context: tokens of a prompt.
        samples: number of texts, which are windows of the file's text.
        depths: positions of the needle in each text, from 0 (beginning) to 1 (end); a prompt for each.
        template_kwargs: ``system`` and arguments of the chat template.

    Raises:
        PromptError: the file cannot be read, or its text is too short.
        ContextError: the context leaves no room for text.
    """
    # A token seldom has more than 16 characters, so the beginning of the text is enough.
    token_ids = encode(tokenizer, data.read_document(path)[: 16 * context * samples])
    step = max(0, min(context, (len(token_ids) - context) // max(1, samples - 1)))
    prompts = []
    for i in range(samples):
        haystack = str(tokenizer.decode(token_ids[i * step : i * step + context], skip_special_tokens=True))
        for depth in sorted(set(depths), reverse=True):
            generator = random.Random(f"{i} {depth}")
            colour, code = generator.choice(COLOURS), str(generator.randrange(10000, 100000))
            needles, question = ((depth, NEEDLE.format(colour=colour, code=code)),), QUESTION.format(colour=colour)
            sample = Sample(haystack, question, "needle", f"{path}:{i + 1}", answers=(code,), needles=needles)
            tokens = data.encode_truncated(sample, tokenizer, context, **template_kwargs)
            if len(tokens) < context - SLACK:
                raise PromptError(f"{path} has {len(token_ids):,} tokens, not {context:,}: give a longer text.")
            prompts.append(Prompt(sample, tuple(tokens), context))
    return prompts


# A drafter's logits (V,), and the target's token id (V,) of each; None: draft and target have one vocabulary.
Prediction = tuple[torch.Tensor, torch.Tensor | None]


class TokenPrediction(NamedTuple):
    """A view's prediction of one token of a needle.

    Attributes:
        is_top1: the token is the drafter's argmax.
        logprob: the token's log-probability by the drafter; None if its vocabulary lacks the token.
    """

    is_top1: bool
    logprob: float | None


class NeedleBench:
    """The measurement on one loaded model.

    Args:
        views: by the view's name, a method, whose drafter is measured, and its options.
        drafts: trained drafts by kind; for other kinds the package's drafts are used.

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
        loaded_drafts = dict(drafts)
        for name, (method, view_options) in views.items():
            kind = get_method(method).draft_kind or ""
            draft = {"draft": loaded_drafts[kind]} if kind in loaded_drafts else {}
            options = {**draft, **view_options, "widths": (1,)}  # one drafted token a round
            recipe = self._recipes[name] = recipe_for(*resolve(method, options), self.runner)
            if "draft" in recipe.options:
                loaded_drafts[kind] = recipe.options["draft"]  # loaded now; the next view shares it
        layers = (recipe.drafter().feature_layers(self.runner) for recipe in self._recipes.values())
        self._cache = PromptCache(next(filter(None, layers), ()))  # keeps the hidden states that drafters read

    @property
    def max_haystack_tokens(self) -> int:
        """The greatest length of a haystack at which any needle fits into the target's context as an answer."""
        longest = max(len(encode(self._tokenizer, NEEDLE.format(colour=c, code=10**5))) for c in COLOURS)
        return self.runner.context_length - longest - 2  # the limit is one token above the answer; one more is spare

    def measure(self, haystack: Prompt, tick: Tick = lambda name: None) -> dict[str, list[TokenPrediction]]:
        """Lets every view predict a haystack's needle. ``tick`` gets the view's name before.

        Returns:
            By the view's name, the predictions of each token of the needle but the first.

        Raises:
            ContextError: haystack and needle exceed the target's context.
        """
        answer = self.needle_tokens(haystack)
        predictions: dict[str, list[TokenPrediction]] = {}
        for name, recipe in self._recipes.items():
            tick(name)
            drafter, tree, sampler = recipe.drafter(), _Top1Tree(), _ForcedSampler(answer)
            cast(TreeDrafter, drafter).tree = tree
            # The limit is the answer and one token, as nothing is drafted for a limit's last token.
            prompt, limit, device = list(haystack.token_ids), len(answer) + 1, self.runner.device
            engine = Engine(self.runner, drafter, _RootVerifier(), self._cache)
            engine.add(sequence.Sequence(0, prompt, limit, device, sampler=sampler, stop_rules=[sampler.is_done]))
            for _ in engine.run():
                pass
            pairs = zip(tree.predictions, answer[1:], strict=True)
            predictions[name] = [_score_prediction(*prediction, token) for prediction, token in pairs]
        return predictions

    def needle_tokens(self, haystack: Prompt) -> list[int]:
        """Token ids of the needle, without its full stop."""
        ((_, needle),) = haystack.sample.needles
        return encode(self._tokenizer, needle.rstrip("."))


class _ForcedSampler(Sampler):
    """Teacher forcing: returns the tokens of an answer, whatever the target's logits are."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(False, Sampling().processors())
        self._answer, self._position = answer, 0

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        self._position += 1
        return self._answer[self._position - 1]

    def is_done(self, decoded: sequence.Sequence) -> sequence.FinishReason | None:
        """A stop rule: the answer is complete."""
        return "length" if len(decoded.output) == len(self._answer) else None


class _RootVerifier(Verifier):
    """Verifies only the roots of trees, so that each round emits one token and all tokens are predicted."""

    def verify(self, sequences: list[sequence.Sequence], trees: list[TokenTree]) -> list[VerifyOutput]:
        return super().verify(sequences, [TokenTree(tree.tokens[:1], (-1,)) for tree in trees])


@dataclass(frozen=True, kw_only=True)
class _Top1Tree(TreeConfig):
    """A tree of one node, the argmax. Stores each round's logits in ``predictions``."""

    name: str = "chain"
    branching: tuple[int, ...] = (1,)
    predictions: list[Prediction] = field(default_factory=list)

    def grow(self, roots: Sequence[int], draft_logits: DraftLogits, *args: Any, **options: Any) -> list[TokenTree]:
        target_ids = args[1] if len(args) > 1 else None

        def store_logits(level: TreeLevel) -> torch.Tensor:
            logits = draft_logits(level)
            self.predictions.extend((row, target_ids) for row in logits[:, 0])
            return logits

        # With draft_topk=None the tree calls store_logits instead of a fused top k.
        return super().grow(roots, store_logits, *args, **options | {"draft_topk": None})


def _score_prediction(logits: torch.Tensor, target_ids: torch.Tensor | None, token: int) -> TokenPrediction:
    """Compares a drafter's logits (V,) with the true token; ``target_ids`` (V,): see :data:`Prediction`."""
    draft_ids = [token] if target_ids is None else (target_ids == token).nonzero().flatten().tolist()
    if not draft_ids or draft_ids[0] >= len(logits):
        return TokenPrediction(False, None)
    logprobs = torch.log_softmax(logits.float(), -1)
    logprob = float(logprobs[draft_ids[0]])
    # NaN and infinity (a draft that overflowed) count as no prediction.
    return TokenPrediction(int(logprobs.argmax()) == draft_ids[0], logprob if math.isfinite(logprob) else None)


def accuracy(tokens: Sequence[TokenPrediction]) -> float | None:
    """Share of tokens that are the drafter's argmax; None without tokens."""
    return mean_of(float(token.is_top1) for token in tokens)


def perplexity(tokens: Sequence[TokenPrediction]) -> float | None:
    """Perplexity of the tokens that the draft's vocabulary has; None without such tokens, or if it overflows."""
    nll = mean_of(None if token.logprob is None else -token.logprob for token in tokens)
    try:
        return None if nll is None else math.exp(nll)
    except OverflowError:
        return None
