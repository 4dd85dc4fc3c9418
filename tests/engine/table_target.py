"""A target that is a table: the next token's logits depend on the last two tokens. Its distributions are known."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList

from longdraft.engine.sampler import Sampling
from longdraft.trees.tree import TokenTree

VOCABULARY = 8
PROMPT = [3, 1, 3, 5]
TABLE = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 1.3
SETTINGS = {
    "plain": Sampling(1.0),
    "temperature": Sampling(0.7),
    "top-k": Sampling(1.0, top_k=3),
    "top-p": Sampling(1.0, top_p=0.8),
    "min-p": Sampling(1.0, min_p=0.15),
    "repetition penalty": Sampling(1.0, repetition_penalty=1.8),
    "all": Sampling(0.8, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.5),
}


def logits_after(text: list[int]) -> torch.Tensor:
    return TABLE[text[-2], text[-1]]


def tree_logits(tree: TokenTree) -> torch.Tensor:
    """(nodes, vocabulary): what one forward over the tree behind the prompt gives; the prompt ends with the root."""
    before = [PROMPT[-2], *(tree.tokens[parent] for parent in tree.parents[1:])]
    return TABLE[before, list(tree.tokens)]


def next_distribution(text: list[int], sampling: Sampling) -> torch.Tensor:
    """The target's processed distribution, computed plainly."""
    scores = sampling.processors()(torch.tensor([text]), logits_after(text)[None].clone())
    return torch.softmax(scores, -1)[0].double()


def text_law(sampling: Sampling, tokens: int) -> torch.Tensor:
    """(vocabulary,) * tokens: how likely plain decoding writes each text after the prompt."""

    def following(text: list[int], left: int) -> torch.Tensor:
        p = next_distribution(text, sampling)
        if left == 1:
            return p
        return torch.stack([p[t] * following([*text, t], left - 1) for t in range(VOCABULARY)])

    return following(PROMPT, tokens)


class Memory(LogitsProcessorList):
    """The same processors, each distinct input computed once."""

    def __init__(self, processors: LogitsProcessorList) -> None:
        super().__init__(processors)
        self.known: dict[tuple, torch.Tensor] = {}

    def __call__(self, text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        key = (*text[0].tolist(), *scores[0].tolist())
        if key not in self.known:
            self.known[key] = super().__call__(text, scores)
        return self.known[key]
