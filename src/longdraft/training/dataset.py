"""The dataset of a training run: reads documents from files or shards, cuts them, and holds some out to measure on.

The tokens of all documents lie end to end: in memory (4 bytes a token), or in shards on disk, which processes share.
``longdraft train data --kind tokens`` writes a folder of shards. A shard is a safetensors file, written atomically and
memory-mapped, so a document takes memory only while it is used.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file

from longdraft.errors import CheckpointError, PromptError
from longdraft.files import atomic_write, file_errors, open_safetensors, read_json
from longdraft.memory.token_ids import common_prefix_len
from longdraft.training.config import LmConfig, RunConfig
from longdraft.training.documents import Document, SkipCounts, encode_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Documents whose first 48 tokens are equal are taken to be about the same passage.
PASSAGE_PREFIX = 48
# A prefix that 64 documents share, or half of all documents, is taken for a system prompt.
SYSTEM_PROMPT_DOCUMENTS = 64
# Longest system prompt that is searched, in tokens.
MAX_SYSTEM_PROMPT = 1 << 14
# Weight of a prompt's token among most frequent tokens, where a token in the loss has 1.
PROMPT_TOKEN_WEIGHT = 0.05
INDEX_FILE = "index.json"
# Fewest tokens of a shard; only the last shard may have fewer.
MIN_SHARD_TOKENS = 1 << 26
# More tokens than a document has.
_ALL_TOKENS = 1 << 40
ADVICE = "Delete the file and run `longdraft train data` again, which encodes what is missing."
# A text that every tokenizer encodes differently. Its token ids identify the tokenizer.
_PROBE = "Tokens, encodés once: 2 + 2 = 4\n\tdef f(x): return x  # 漢字 🙂"


class TokenShard(NamedTuple):
    """Documents end to end. The fields are the tensors of a shard's file."""

    ids: (
        torch.Tensor
    )  # (tokens,) int32 token ids; ~id: a token behind ``start`` that is not in the loss (a user's turn)
    ends: torch.Tensor  # (documents,) int64, the end of each document in ``ids``
    starts: torch.Tensor  # (documents,) int32, the :attr:`Document.start` of each document

    @classmethod
    def from_documents(cls, documents: Iterable[Document | None]) -> TokenShard:
        ids, ends, starts = array("i"), array("q"), array("i")
        for document in filter(None, documents):
            mask = document.loss_mask or [True] * len(document.token_ids)
            pairs = enumerate(zip(document.token_ids, mask, strict=True))
            ids.extend(t if in_loss or i < document.start else ~t for i, (t, in_loss) in pairs)
            ends.append(len(ids))
            starts.append(document.start)
        return cls(torch.tensor(ids), torch.tensor(ends), torch.tensor(starts))

    def digest(self) -> str:
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in self)).hexdigest()[:16]


class ShardIds(NamedTuple):
    """The token ids of a shard, and the shard's digest."""

    ids: torch.Tensor
    digest: str


class TokenDataset(Sequence[Document]):
    """Documents or segments of documents, in a fixed order. A document is a range of a shard's ids.

    Five arrays have an entry for each document, 22 bytes together.

    Attributes:
        shards: the ids of each shard.
        lengths: number of tokens of each document.
        starts: :attr:`Document.start` of each document.
        masked_counts: number of tokens from ``start`` on that are marked as not in the loss; 0: all are in the loss,
            even if some are marked.
    """

    def __init__(self, shards: Sequence[ShardIds] = ()) -> None:
        self.shards = list(shards)
        self.lengths, self.starts, self.masked_counts = array("i"), array("i"), array("i")
        self._shard_indices, self._offsets = array("H"), array("q")  # the shard of a document, and its place in the ids

    def add_shard(self, shard: TokenShard, disk_digest: str | None = None) -> None:
        """Adds the documents of a shard. ``disk_digest``: the digest in the shard's file; None: there is no file."""
        ends = shard.ends.tolist()
        offsets = [0, *ends[:-1]]
        self._shard_indices.extend([len(self.shards)] * len(ends))
        self._offsets.extend(offsets)
        self.lengths.extend(map(sub, ends, offsets))
        self.starts.extend(shard.starts.tolist())
        self.masked_counts.extend([0] * len(ends))
        self.shards.append(ShardIds(shard.ids, disk_digest or shard.digest()))

    def add_shard_file(self, path: Path) -> None:
        """Adds the documents of a shard's file. Raises CheckpointError if the file is missing or damaged."""
        with open_safetensors(path, ADVICE) as file:
            self.add_shard(TokenShard(*map(file.get_tensor, TokenShard._fields)), file.metadata()["digest"])

    def add_segment(self, dataset: TokenDataset, i: int, first: int, length: int, start: int, num_masked: int) -> None:
        """Adds ``length`` tokens, from token ``first`` on, of document i of a dataset with the same shards.
        ``start`` and ``num_masked`` are the segment's entries of ``starts`` and ``masked_counts``."""
        self._shard_indices.append(dataset._shard_indices[i])
        self._offsets.append(dataset._offsets[i] + first)
        self.lengths.append(length)
        self.starts.append(start)
        self.masked_counts.append(num_masked)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Document:  # type: ignore[override]  # no slices
        loss_mask = (self._marked_ids(i) >= 0).tolist() if self.masked_counts[i] else None
        return Document(self.token_ids(i).tolist(), self.starts[i], loss_mask)

    def token_ids(self, i: int, first: int = 0, max_tokens: int = _ALL_TOKENS) -> torch.Tensor:
        """Returns at most ``max_tokens`` token ids of document i, from the document's token ``first`` on."""
        marked = self._marked_ids(i, first, max_tokens)
        return torch.where(marked < 0, ~marked, marked)

    def count_masked(self, i: int, first: int, num_tokens: int) -> int:
        """Counts the tokens marked as not in the loss, among ``num_tokens`` of document i from ``first`` on."""
        return int((self._marked_ids(i, first, num_tokens) < 0).sum())

    def _marked_ids(self, i: int, first: int = 0, max_tokens: int = _ALL_TOKENS) -> torch.Tensor:
        """Returns :meth:`token_ids`, with ~id for tokens that do not count in the loss."""
        ids, offset = self.shards[self._shard_indices[i]].ids, self._offsets[i]
        return ids[offset + first : offset + min(first + max_tokens, self.lengths[i])]

    def digest(self) -> str:
        """Returns a hash of all documents. A run resumes only from a checkpoint with an equal hash."""
        hashed = hashlib.sha256(repr([shard.digest for shard in self.shards]).encode())
        for column in (self._shard_indices, self._offsets, self.lengths, self.starts, self.masked_counts):
            hashed.update(column.tobytes())
        return hashed.hexdigest()[:16]


def split_dataset(
    dataset: TokenDataset, skipped: SkipCounts, config: RunConfig, levels: int, max_target_length: int = 1 << 30
) -> tuple[TokenDataset, TokenDataset]:
    """Cuts and filters documents, and returns (documents to train on, documents to measure on). Raises PromptError if
    nothing is left to train on or to measure on.

    Plain text is cut into segments of ``max_length`` tokens. A document with a prompt loses its end, and is left out if
    the prompt alone fills ``max_length``. For a language model, a document with a prompt loses its beginning; with
    ``learn_prompts``, the prompt of a document that fits counts in the loss too.

    A hash of a document's first tokens, behind a system prompt, decides between training and measuring. So all segments
    of a document, and all documents about one passage, go to the same side. If ``config.held_out`` is not 0 and there
    are two passages or more, at least one passage is held out.

    Args:
        dataset: the documents, which are not cut.
        levels: number of drafted tokens (the largest shift). A document must have more tokens in the loss than this.
        max_target_length: longest input of the target, in tokens.
    """
    max_length, keep_end = min(config.max_length, max_target_length), isinstance(config, LmConfig)
    learn_prompts = isinstance(config, LmConfig) and config.learn_prompts
    train, held_out = TokenDataset(dataset.shards), TokenDataset(dataset.shards)
    content_starts = _find_content_starts(dataset)
    fractions = array("d", (_hash_fraction(dataset, i, content_starts[i], "held out") for i in range(len(dataset))))
    lowest, held_out_below = sorted(set(fractions))[:2], config.held_out
    if config.held_out and len(lowest) > 1:
        held_out_below = max(config.held_out, lowest[1])  # at least the passage with the lowest fraction
    for i, (length, start) in enumerate(zip(dataset.lengths, dataset.starts, strict=True)):
        # (first token, number of tokens, start) of each segment
        if start == 1:  # plain text
            segments = [(cut, min(max_length, length - cut), 1) for cut in range(0, length - 1, max_length)]
        elif keep_end:
            cut = max(0, length - max_length)
            segments = [(cut, length - cut, max(1, start - cut))]
        elif start < max_length:
            segments = [(0, min(length, max_length), start)]
        else:
            skipped["with a prompt longer than max_length"] += 1
            continue
        split = held_out if fractions[i] < held_out_below else train
        for first, segment_length, segment_start in segments:
            # Segments of plain text are sampled one by one, chats by their passage.
            hashed_from = first if first and start == 1 else content_starts[i]
            if config.sample < 1 and _hash_fraction(dataset, i, hashed_from, "sample") >= config.sample:
                continue
            learns_prompt = learn_prompts and split is train and segment_length < max_length
            num_behind_start, num_masked = segment_length - segment_start, 0
            if start > 1 and config.learn == "answers" and not learns_prompt:
                num_masked = dataset.count_masked(i, first + segment_start, num_behind_start)
            if segment_length < config.min_length or num_behind_start - num_masked <= levels:
                skipped["too short"] += 1
            else:
                segment_start = 1 if learns_prompt else segment_start
                split.add_segment(dataset, i, first, segment_length, segment_start, num_masked)
    summary = f"left out: {skipped}; held out: {len(held_out)}"
    if not len(train):
        raise PromptError(f"Nothing to train on ({summary}): give more rows with `text`, `messages` or `tokens`.")
    if config.held_out and not len(held_out):
        raise PromptError(
            f"Nothing is held out of {len(train)} documents to measure on ({summary}): raise held_out, give more text, "
            "or set held_out=0, which keeps the last draft as the best."
        )
    return train, held_out


def _find_content_starts(dataset: TokenDataset) -> array[int]:
    """Returns, for each document, the index of the first token behind a prefix of many documents (a system prompt)."""
    content_starts, groups = array("i", bytes(4 * len(dataset))), [torch.arange(len(dataset))]
    min_documents = max(2, min(SYSTEM_PROMPT_DOCUMENTS, len(dataset) / 2))
    while groups:  # the documents of a group share a prefix, and may share more tokens behind the prefix
        members = groups.pop()
        prefixes = (dataset.token_ids(i, content_starts[i], PASSAGE_PREFIX) for i in members.tolist())
        hashes = torch.tensor(array("q", map(_hash, prefixes)))
        values, counts = hashes.unique(return_counts=True)
        for value in values[counts >= min_documents].tolist():
            group = members[hashes == value]
            first = int(group[0])
            prefix = dataset.token_ids(first, content_starts[first], MAX_SYSTEM_PROMPT).tolist()
            for i in group.tolist():
                token_ids = dataset.token_ids(i, content_starts[i], len(prefix)).tolist()
                prefix = prefix[: common_prefix_len(prefix, token_ids)]
            if prefix:
                for i in group.tolist():
                    content_starts[i] += len(prefix)
                groups.append(group)
    return content_starts


def _hash(token_ids: torch.Tensor, purpose: str = "") -> int:
    """Returns a hash of token ids, independent for each ``purpose``: 48 bits, which fit int64 and a float exactly."""
    return int.from_bytes(hashlib.sha256(f"{purpose}{token_ids.tolist()}".encode()).digest()[:6], "big")


def _hash_fraction(dataset: TokenDataset, i: int, first: int, purpose: str) -> float:
    """Returns a number in [0, 1) from a hash of document i's tokens from ``first`` on."""
    return _hash(dataset.token_ids(i, first, PASSAGE_PREFIX), purpose) / 2**48


def most_frequent_tokens(
    documents: Iterable[Document], vocab_size: int, draft_vocab_size: int, always: Iterable[int] = ()
) -> torch.Tensor:
    """Returns the ``draft_vocab_size`` token ids that are most frequent in the loss, sorted: a draft's vocabulary.

    A smaller vocabulary makes the draft's head smaller. Other tokens are never drafted; the output stays exact. Tokens
    before ``start`` count a little, because a draft may copy them. The ids in ``always`` (end of sequence) are included
    in any case.
    """
    frequencies = torch.zeros(vocab_size, dtype=torch.float64)
    for document in documents:
        ids, mask = torch.tensor(document.token_ids), document.loss_mask
        weights = torch.full((len(ids),), PROMPT_TOKEN_WEIGHT, dtype=torch.float64)
        weights[document.start :] = 1 if mask is None else torch.tensor(mask[document.start :])
        frequencies += torch.bincount(ids, weights, vocab_size)
    frequencies[list(always)] = float("inf")
    return frequencies.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values


def read_dataset(
    sources: Iterable[str], tokenizer: PreTrainedTokenizerBase, skipped: SkipCounts, vocab_size: int,
    template: Mapping[str, Any] | None = None,
) -> TokenDataset:  # fmt: skip
    """Encodes files and folders into memory, and maps folders of shards. The arguments are :func:`encode_documents`'s.

    Raises CheckpointError if a folder's shards are incomplete, damaged, or of another tokenizer.
    """
    dataset = TokenDataset()
    for source in map(Path, sources):
        if not ((source / INDEX_FILE).is_file() and shard_paths(source)):
            documents = encode_documents([source], tokenizer, skipped, vocab_size, template=template)
            dataset.add_shard(TokenShard.from_documents(documents))
            continue
        if "rows" not in _read_index(source, tokenizer):  # written when all rows are encoded
            raise CheckpointError(f"{source} is not finished: the same `longdraft train data` command continues it.")
        for path in shard_paths(source):
            dataset.add_shard_file(path)
    return dataset


def write_shards(
    folder: Path, documents: Iterable[Document | None], tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int, int], None] = lambda rows, tokens: None, stop: Callable[[], bool] = lambda: False,
) -> int:  # fmt: skip
    """Writes the shards that a folder lacks, and returns the number of documents that were added.

    Args:
        documents: the document of each row from row :func:`num_examples_done` on; None: the row is left out.
        progress: called after every 100 rows with the numbers of documents and tokens that were added.
        stop: called after every 100 rows; if it returns True, the work ends, and only complete shards are kept.

    Raises:
        CheckpointError: a shard cannot be written, or another tokenizer encoded the folder.
        PromptError: there are no documents.
    """
    index, num_rows = _read_index(folder, tokenizer), num_examples_done(folder)
    num_added, num_tokens = 0, 0
    pending, num_pending_tokens = list[Document](), 0

    def write_shard() -> None:
        shard = TokenShard.from_documents(pending)
        with atomic_write(folder / f"tokens-{len(shard_paths(folder)):05d}.safetensors") as part:
            save_file(shard._asdict(), part, {"rows": f"{num_rows}", "digest": shard.digest()})
        pending.clear()

    for document in documents:
        num_rows += 1
        if document is not None:
            pending.append(document)
            num_added, num_tokens = num_added + 1, num_tokens + len(document.token_ids)
            num_pending_tokens += len(document.token_ids)
        if num_pending_tokens >= MIN_SHARD_TOKENS:
            write_shard()
            num_pending_tokens = 0
        if num_rows % 100 == 0:
            progress(num_added, num_tokens)
            if stop():
                return num_added
    if pending:
        write_shard()
    if not shard_paths(folder):
        raise PromptError("There is nothing to write: give rows with `text`, `messages` or `tokens`.")
    with atomic_write(folder / INDEX_FILE) as part:
        part.write_text(json.dumps(index | {"rows": num_rows}), encoding="utf-8")
    progress(num_added, num_tokens)
    return num_added


def shard_paths(folder: Path) -> list[Path]:
    """Returns the shard files of a folder, in order."""
    return sorted(folder.glob("tokens-*.safetensors"))


def num_examples_done(folder: Path) -> int:
    """Returns the number of rows that a folder's shards cover, rows that were left out included."""
    for path in shard_paths(folder)[-1:]:
        with open_safetensors(path, ADVICE) as file:
            return int(file.metadata()["rows"])
    return 0


def _read_index(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Reads a folder's index, or creates it. Raises CheckpointError if another tokenizer encoded the folder."""
    path = folder / INDEX_FILE
    expected = {"tokenizer": hashlib.sha256(repr(tokenizer(_PROBE)["input_ids"]).encode()).hexdigest()[:16]}
    if not path.exists():
        with atomic_write(path) as part:
            part.write_text(json.dumps(expected), encoding="utf-8")
    with file_errors(path, f"{path} cannot be read", ADVICE):
        index = read_json(path)
    if index.get("tokenizer") != expected["tokenizer"]:
        raise CheckpointError(f"{folder} was encoded by another tokenizer: encode the text again for this target.")
    return index
