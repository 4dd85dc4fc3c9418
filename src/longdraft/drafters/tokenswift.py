"""TokenSwift: self-drafting of one token, chained heads, and phrases of the output (Wu et al. 2025, section 3).

A forward of the target on a sparse view of its KV computes the root's hidden state and drafts one token, the first
level. The heads start from that state, and draft three levels, with three children for each node. The phrases (n-grams)
of the output are counted, and the k most frequent phrases that start with the first draft token are merged into the
tree; or, if there is no draft token, the phrases that start with the root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any

from longdraft.drafters.combined import CombinedDrafter
from longdraft.drafters.heads import HeadOptions, HeadsDraft, HeadsDrafter
from longdraft.drafters.self_drafter import VIEW_SCORERS, SelfDrafter, ViewOptions
from longdraft.engine.drafter import Drafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.options import declared, option, parse, takes, whole_number
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree, tree_from_paths

# Number of tokens of a phrase, and of phrases to propose, in the paper.
PHRASE_LENGTH, NUM_PHRASES = 4, 20


class PhraseTable:
    """Counts the phrases of a growing output, at a cost for each token that does not depend on the output's length.
    ``n``: number of tokens of a phrase. ``k``: number of phrases that are ranked for each first token."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.token_ids: list[int] = []
        # How often each phrase, and each prefix of a phrase, occurred.
        self._counts: defaultdict[tuple[int, ...], int] = defaultdict(int)
        # {first token: the k most frequent phrases, sorted}. A phrase that was dropped may return when it occurs again.
        self._best: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)

    def extend(self, tokens: SequenceOf[int]) -> None:
        for token in tokens:
            self.token_ids.append(token)
            if len(self.token_ids) < self.n:
                continue
            phrase = tuple(self.token_ids[-self.n :])
            for length in range(1, self.n + 1):
                self._counts[phrase[:length]] += 1
            self._rank(phrase)

    def _rank(self, phrase: tuple[int, ...]) -> None:
        """Moves the phrase that just occurred before all phrases that are at most as frequent."""
        best = self._best[phrase[0]]
        if phrase in best:
            best.remove(phrase)
        count = self._counts[phrase]
        rank = next((i for i, other in enumerate(best) if self._counts[other] <= count), len(best))
        best.insert(rank, phrase)
        del best[self.k :]

    def continuations(self, token: int) -> list[tuple[int, ...]]:
        """Returns the most frequent continuations of a token, the most frequent first. Each has n - 1 tokens."""
        return [phrase[1:] for phrase in self._best.get(token, ())]

    def logprobs(self, token: int, continuation: SequenceOf[int]) -> list[float]:
        """Returns each token's log-probability given the tokens before it. All unseen tokens together count as one."""
        phrase = (token, *continuation)
        counts = [self._counts[phrase[:length]] for length in range(1, len(phrase) + 1)]
        return [log(count / (prefix_count + 1)) for prefix_count, count in pairwise(counts)]


class ReuseDrafter(Drafter):
    """Proposes the most frequent phrases that start with the output's last token (the paper's "token reuse").
    ``n``: number of tokens of a phrase. ``k``: maximum number of phrases; None: 20, or 1 if drafts must be chains."""

    free = True

    def __init__(self, n: int = PHRASE_LENGTH, k: int | None = None) -> None:
        self.n, self.k, self._has_user_k = n, NUM_PHRASES if k is None else k, k is not None
        whole_number("reuse_n", n, 2)
        whole_number("reuse_k", self.k, 1)
        self.max_nodes = self.k * (n - 1)
        self._phrases: dict[int, PhraseTable] = {}

    def use_chains(self) -> bool:
        if not self._has_user_k:
            self.k, self.max_nodes = 1, self.n - 1
        return self.k == 1

    def observe(self, round_result: RoundResult) -> None:
        if round_result.is_prefill:
            self._phrases[round_result.sequence.index] = PhraseTable(self.n, self.k)

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        trees = []
        for s in sequences:
            phrases, root = self._phrases[s.index], s.output[-1]
            phrases.extend(s.output[len(phrases.token_ids) :])
            paths = phrases.continuations(root)
            trees.append(tree_from_paths(root, paths, logprobs=[phrases.logprobs(root, path) for path in paths]))
        return trees

    def extend_draft(self, s: Sequence, draft_tree: TokenTree) -> TokenTree:
        """Returns a tree of the phrases that start with the most probable first token of the draft tree."""
        child = max(draft_tree.children(0).values(), key=draft_tree.path_logprobs.__getitem__)
        token, logprob, phrases = draft_tree.tokens[child], draft_tree.path_logprobs[child], self._phrases[s.index]
        paths = phrases.continuations(token)
        logprobs = [[logprob, *phrases.logprobs(token, path)] for path in paths]
        return tree_from_paths(s.output[-1], [(token, *path) for path in paths], logprobs=logprobs)

    def release(self, sequence: Sequence) -> None:
        self._phrases.pop(sequence.index, None)


class TokenSwiftDrafter(CombinedDrafter):
    """Drafts with heads, and with phrases that start with the heads' first draft token."""

    lookup: ReuseDrafter

    def adapt_lookup(self, s: Sequence, lookup_tree: TokenTree, draft_tree: TokenTree) -> TokenTree:
        return self.lookup.extend_draft(s, draft_tree) if draft_tree.num_draft_tokens else lookup_tree


# Value of the option ``view`` with which the target drafts no first token.
NO_VIEW = "none"


@dataclass(frozen=True)
class TokenSwiftOptions(ViewOptions):
    """Options of the target's view, and of phrases."""

    view: str = option(
        "tokens",
        choices=(*VIEW_SCORERS, NO_VIEW),
        help="the part of its KV that the target drafts the first token on; none: the heads draft alone",
    )
    reuse: bool = option(True, help="also propose phrases of the output")
    reuse_n: int = option(PHRASE_LENGTH, min=2, help="tokens of a phrase")
    reuse_k: int = option(NUM_PHRASES, min=1, help="maximum number of phrases")


@takes(HeadOptions, TreeOptions, TokenSwiftOptions)
def tokenswift(draft: HeadsDraft, **options: Any) -> Drafter:
    """Makes TokenSwift's drafter (Wu et al. 2025, arXiv:2502.18890, section 3).

    Args:
        options: fields of :class:`HeadOptions`, :class:`TreeOptions` and :class:`TokenSwiftOptions`. ``widths`` starts
            with the level that the target drafts. The tree's options do not limit the phrases.
    """
    head_options, tree_options, config = parse("tokenswift", options, HeadOptions, TreeOptions, TokenSwiftOptions)
    view_options = {name: getattr(config, name) for name in declared(ViewOptions)}
    self_drafter = None
    if config.view != NO_VIEW:
        self_drafter = SelfDrafter(view=config.view, depth=1, **view_options)
    elif names := [name for name, value in view_options.items() if value is not None]:
        raise ValueError(f"{' and '.join(names)} shape a view: leave view={NO_VIEW} out, or leave these options out")
    heads = HeadsDrafter(draft, self_drafter, **head_options.non_none(), **tree_options.non_none())
    user_k = config.reuse_k if "reuse_k" in options else None
    return TokenSwiftDrafter(ReuseDrafter(config.reuse_n, user_k), heads) if config.reuse else heads
