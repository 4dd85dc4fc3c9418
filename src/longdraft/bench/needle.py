"""Measures how well drafters predict a needle, by their view of the context (SpecExtend, section 2.2, table 1).

The needle is a sentence with a code, somewhere in a long text (the haystack). After the haystack the engine emits the
tokens of the needle, whatever the target predicts (teacher forcing). So all drafters predict the same tokens after the
same context. Before each token but the first the drafter proposes as in decoding; the log-probability that it gives the
true token is recorded. Each token takes one target forward: retrieval chooses chunks by the attention of that forward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedTokenizerBase

from longdraft.bench.data import Sample, encode_truncated
from longdraft.bench.experiment import Tick, no_bar
from longdraft.bench.prompts import Prompt
from longdraft.bench.tables import mean_of
from longdraft.bench.tasks import read_document
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts.draft import Draft
from longdraft.engine import sequence
from longdraft.engine.chat import encode
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.engine.verifier import Verifier, VerifyOutput
from longdraft.errors import PromptError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.load.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner
from longdraft.recipes import Recipe, recipe_for, resolve
from longdraft.registry import get_method
from longdraft.trees.level import LevelExpander, TreeLevel, logits_or_topk
from longdraft.trees.tree import TokenTree, root_tree
from longdraft.trees.tree_config import TreeConfig

# The code ends the sentence: before the code's tokens, retrieval has chosen the drafter's view a few times.
NEEDLE = "The secret code of the {colour} door is {code}."
QUESTION = "What is the secret code of the {colour} door?"
COLOURS = ("blue", "red", "green", "yellow", "white", "black")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SLACK = 16  # a haystack may be this many tokens shorter than asked, because cuts are made between characters


def make_haystacks(
    path: Path, context_tokens: int, tokenizer: PreTrainedTokenizerBase, num_texts: int = 2,
    depths: Sequence[float] = DEPTHS, **template_kwargs: Any,
) -> list[Prompt]:  # fmt: skip
    """Makes prompts with a needle, text by text, the deepest needle first: prompts share the text before the needles.

    Args:
        path: a JSONL file of prompts, or plain text.
        context_tokens: tokens of a prompt.
        num_texts: number of texts. Each text is a window of the file's text.
        depths: positions of the needle in each text, from 0 (beginning) to 1 (end). Each depth makes a prompt.

    Raises:
        PromptError: the file cannot be read, or its text is too short.
        ContextError: the context leaves no room for text.
    """
    # A token seldom has more than 16 characters, so the beginning of the text is enough.
    token_ids = encode(tokenizer, read_document(path)[: 16 * context_tokens * num_texts])
    stride = max(0, min(context_tokens, (len(token_ids) - context_tokens) // max(1, num_texts - 1)))
    prompts = []
    for i in range(num_texts):
        haystack = str(tokenizer.decode(token_ids[i * stride : i * stride + context_tokens], skip_special_tokens=True))
        for depth in sorted(set(depths), reverse=True):
            generator = random.Random(f"{i} {depth}")
            colour, code = generator.choice(COLOURS), str(generator.randrange(10000, 100000))
            needles, question = ((depth, NEEDLE.format(colour=colour, code=code)),), QUESTION.format(colour=colour)
            sample = Sample(haystack, question, "needle", f"{path}:{i + 1}", answers=(code,), needles=needles)
            tokens = encode_truncated(sample, tokenizer, context_tokens, **template_kwargs)
            if len(tokens) < context_tokens - SLACK:
                raise PromptError(f"{path} has {len(token_ids):,} tokens, not {context_tokens:,}: give a longer text.")
            prompts.append(Prompt(sample, tuple(tokens), context_tokens))
    return prompts


# A drafter's logits (V,) over its vocabulary of V tokens, and the target's id of each of these tokens (V,). The ids are
# None if draft and target have the same vocabulary.
StoredLogits = tuple[torch.Tensor, torch.Tensor | None]


class TokenPrediction(NamedTuple):
    """A drafter's prediction of one token of a needle."""

    is_top1: bool  # the drafter gives this token the greatest probability
    # the drafter's log-probability of this token; None if the drafter's vocabulary lacks the token
    logprob: float | None


class NeedleBench:
    """Measures drafters on one loaded model.

    Args:
        views: by the name of a view, the method whose drafter is measured, and options, which include the view.
        drafts: trained drafts by kind. For other kinds the package's drafts are used.

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
                loaded_drafts[kind] = recipe.options["draft"]  # now loaded: the next view uses the same draft
        # The cache keeps the hidden states of the layers that the first drafter with such layers reads.
        feature_layers = (recipe.drafter().needs(self.runner).feature_layers for recipe in self._recipes.values())
        self._cache = PromptCache(next(filter(None, feature_layers), ()))

    @property
    def max_haystack_tokens(self) -> int:
        """The greatest length of a haystack after which the target's context has room for any needle."""
        longest = max(len(encode(self._tokenizer, NEEDLE.format(colour=colour, code=10**5))) for colour in COLOURS)
        return self.runner.context_length - longest - 2  # one token more is allowed (see measure), and one is spare

    def measure(self, haystack: Prompt, tick: Tick = no_bar) -> dict[str, list[TokenPrediction]]:
        """Lets every drafter predict a haystack's needle. Calls ``tick`` with the view's name before each drafter.

        Returns:
            By the view's name, the prediction of each token of the needle but the first.

        Raises:
            ContextError: haystack and needle exceed the target's context.
        """
        needle = self.needle_tokens(haystack)
        predictions: dict[str, list[TokenPrediction]] = {}
        for name, recipe in self._recipes.items():
            tick(name)
            drafter, tree, sampler = recipe.drafter(), _Top1Tree(), _ForcedSampler(needle)
            cast(TreeDrafter, drafter).tree = tree
            # One token more than the needle: a drafter proposes nothing for the last token that max_tokens allows.
            prompt, max_tokens, device = list(haystack.token_ids), len(needle) + 1, self.runner.device
            engine = Engine(self.runner, drafter, _RootVerifier(), self._cache)
            engine.add(sequence.Sequence(0, prompt, max_tokens, device, sampler=sampler, stop_rules=[sampler.is_done]))
            for step in engine.run():
                if step.mode == "prefill" and step.prefilled < len(prompt):
                    tick(name, step.prefilled)
            pairs = zip(tree.stored_logits, needle[1:], strict=True)
            predictions[name] = [_score_prediction(logits, ids, token) for (logits, ids), token in pairs]
        return predictions

    def needle_tokens(self, haystack: Prompt) -> list[int]:
        """Returns the token ids of a haystack's needle, without the full stop."""
        ((_, needle),) = haystack.sample.needles
        return encode(self._tokenizer, needle.rstrip("."))


class _ForcedSampler(Sampler):
    """Returns the tokens of a needle one after the other, whatever the target's logits are (teacher forcing)."""

    def __init__(self, needle: list[int]) -> None:
        super().__init__(greedy=False, processors=Sampling().processors())
        self._needle, self._position = needle, 0

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        self._position += 1
        return self._needle[self._position - 1]

    def is_done(self, decoded: sequence.Sequence) -> sequence.FinishReason | None:
        """A stop rule: ends the sequence when the needle is complete."""
        return "length" if len(decoded.output) == len(self._needle) else None


class _RootVerifier(Verifier):
    """Verifies only the root of each tree. So each round emits one token, and the drafter predicts every token."""

    def verify(
        self, sequences: list[sequence.Sequence], trees: list[TokenTree], query_layers: tuple[int, ...] = ()
    ) -> list[VerifyOutput]:
        return super().verify(sequences, [root_tree(tree.tokens[0]) for tree in trees], query_layers)


@dataclass(frozen=True, kw_only=True)
class _Top1Tree(TreeConfig):
    """Grows trees of one node, the drafter's argmax. Stores the logits of each round in ``stored_logits``."""

    name: str = "chain"
    branching: tuple[int, ...] = (1,)
    stored_logits: list[StoredLogits] = field(default_factory=list)

    def grow(
        self, roots: Sequence[int], expander: LevelExpander, max_depths: Sequence[int] | None = None
    ) -> list[TokenTree]:
        def store_logits(level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
            (logits,) = expander.logits_or_topk(level, 0)
            self.stored_logits.extend((root_logits, expander.draft_to_target_ids) for root_logits in logits[:, 0])
            return logits_or_topk(logits, top_k)

        return super().grow(roots, replace(expander, logits_or_topk=store_logits), max_depths)


def _score_prediction(logits: torch.Tensor, target_ids: torch.Tensor | None, token: int) -> TokenPrediction:
    """Compares a drafter's logits with the true token. ``logits`` and ``target_ids``: see :data:`StoredLogits`."""
    draft_ids = [token] if target_ids is None else (target_ids == token).nonzero().flatten().tolist()
    if not draft_ids or draft_ids[0] >= len(logits):
        return TokenPrediction(False, None)
    logprobs = torch.log_softmax(logits.float(), -1)
    logprob = float(logprobs[draft_ids[0]])
    # NaN and infinity (a draft that overflowed) count as no prediction.
    return TokenPrediction(int(logprobs.argmax()) == draft_ids[0], logprob if math.isfinite(logprob) else None)


def accuracy(predictions: Sequence[TokenPrediction]) -> float | None:
    """Returns the share of predictions with the true token as the drafter's argmax; None without predictions."""
    return mean_of(float(prediction.is_top1) for prediction in predictions)


def perplexity(predictions: Sequence[TokenPrediction]) -> float | None:
    """Returns the perplexity of the predictions with a log-probability; None if there are none, or on overflow."""
    nll = mean_of(None if prediction.logprob is None else -prediction.logprob for prediction in predictions)
    try:
        return None if nll is None else math.exp(nll)
    except OverflowError:
        return None
