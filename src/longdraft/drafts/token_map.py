"""Matches the tokens of two vocabularies by their text, so that a language model of any family drafts for any target.

The draft proposes the tokens that both vocabularies have, with probabilities over these alone (TLI, Timor et al. 2025,
arXiv:2502.05202). A target token that the draft lacks is fed to it as the longest of its tokens with which the target
token's text ends, so a token is one position for both. This affects acceptance alone: the target decides every token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of sentencepiece


@dataclass(frozen=True)
class TokenMap:
    """A draft's tokens in a target's vocabulary, on the CPU."""

    draft_ids: torch.Tensor  # (n,) increasing draft ids of the proposed tokens, which both vocabularies have
    target_ids: torch.Tensor  # (n,) their target ids
    input_ids: torch.Tensor  # (target vocabulary,) the draft id that is fed for each target id


def match_tokens(
    draft_vocab: Mapping[int, str], target_vocab: Mapping[int, str], num_proposed: int, target_size: int
) -> TokenMap:
    """Matches two vocabularies, token id -> token, by the bytes that their tokens stand for.

    Args:
        num_proposed: only draft ids below it are proposed.
        target_size: number of rows of the target's head, of which the last ones may be padding.
    """
    draft_ids = {text: i for i, text in token_texts(draft_vocab).items()}
    target_texts = {i: text for i, text in token_texts(target_vocab).items() if i < target_size}
    target_ids = {text: i for i, text in target_texts.items()}
    pairs = sorted(
        (draft_ids[text], i) for text, i in target_ids.items() if draft_ids.get(text, num_proposed) < num_proposed
    )
    input_ids = [0] * target_size
    for i, text in target_texts.items():
        suffixes = (text[start:] for start in range(len(text)))
        input_ids[i] = next((draft_ids[suffix] for suffix in suffixes if suffix in draft_ids), 0)
    ids = torch.tensor(pairs, dtype=torch.long, device="cpu").view(-1, 2)
    return TokenMap(ids[:, 0], ids[:, 1], torch.tensor(input_ids, dtype=torch.long, device="cpu"))


def token_texts(vocab: Mapping[int, str]) -> dict[int, bytes]:
    """Returns token id -> the bytes that the token stands for, by increasing id: of byte-level BPE ("Ġthe"), of
    sentencepiece ("▁the", "<0x0A>"), or of tokens that are plain text. Of two tokens with the same bytes, such as
    sentencepiece's "a" and "<0x61>", the one that texts have comes last."""
    tokens = set(vocab.values())
    if "▁" in tokens:
        return {i: _sentencepiece_text(token) for i, token in sorted(vocab.items())}
    is_byte_level = "Ġ" in tokens
    return {i: _byte_level_text(token) if is_byte_level else token.encode() for i, token in sorted(vocab.items())}


def _sentencepiece_text(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return token.replace("▁", " ").encode() if byte is None else bytes.fromhex(byte[1])


def _byte_level_text(token: str) -> bytes:
    # Added tokens are plain text, which may have other characters.
    return bytes(_BYTES[c] for c in token) if _BYTES.keys() >= set(token) else token.encode()
