"""The documents of a run: read from files or shards, cut to length, split into learned and held out, in a fixed order.

Tokens of many texts lie end to end: in memory, 4 bytes each, or in shards on disk that processes share. A folder of
shards is written once by ``longdraft train data --kind tokens``. Each shard is a safetensors file that appears whole or
not at all, and is mapped into memory when it is read: the tokens of a text become memory of a process only while the
text is used.
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

# Documents with this many first tokens in common are about the same passage.
PASSAGE_PREFIX = 48
# So many documents with a beginning in common, or half of all, are about different passages behind it.
MAX_SAME_PREFIX = 64
# Tokens of a beginning that are compared.
MAX_SHARED_PREFIX = 1 << 14
INDEX_FILE = "index.json"
# Tokens of a shard, at least; the last one has fewer.
SHARD = 1 << 26
ADVICE = "Delete the file and run `longdraft train data` again: it encodes what is missing."
# Every tokenizer encodes this in its own way.
_PROBE = "Tokens, encodés once: 2 + 2 = 4\n\tdef f(x): return x  # 漢字 🙂"


class TokenShard(NamedTuple):
    """The documents of a file or shard, end to end.

    Attributes:
        ids: (N,) int32; ~id for a token behind the first learned one that is not learned (another speaker's).
        ends: (D,) int64, where each document ends. starts: (D,) int32, its first learned token.
    """

    ids: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def from_documents(cls, documents: Iterable[Document | None]) -> TokenShard:
        ids, ends, starts = array("i"), array("q"), array("i")
        for document in filter(None, documents):
            learned = document.loss_mask or [True] * len(document.token_ids)
            each = enumerate(zip(document.token_ids, learned, strict=True))
            ids.extend(t if own or i < document.start else ~t for i, (t, own) in each)
            ends.append(len(ids))
            starts.append(document.start)
        return cls(torch.tensor(ids), torch.tensor(ends), torch.tensor(starts))

    def digest(self) -> str:
        """A name for the content."""
        return hashlib.sha256(b"".join(each.numpy().tobytes() for each in self)).hexdigest()[:16]


class TokenDataset(Sequence[Document]):
    """Documents or pieces of them, in a fixed order. Their tokens stay where they are: one takes 22 bytes here.

    Attributes:
        sources: tokens of each source, a name for its content, and whether it is on disk.
        lengths, starts: tokens of each document, and its first learned token.
        unlearned: how many tokens behind that are not learned, of pieces; all of a whole document are taken as learned.
    """

    def __init__(self, sources: Sequence[tuple[torch.Tensor, str, bool]] = ()) -> None:
        self.sources = list(sources)
        self.lengths, self.starts, self.masked_counts = array("i"), array("i"), array("i")
        self._source, self._begins = array("H"), array("q")

    def add_shard(self, shard: TokenShard, disk_digest: str | None = None) -> None:
        """Adds the documents of a source. ``disk_digest``: its digest, if it is mapped from there."""
        ends = shard.ends.tolist()
        begins = [0, *ends[:-1]]
        self._source.extend([len(self.sources)] * len(ends))
        self._begins.extend(begins)
        self.lengths.extend(map(sub, ends, begins))
        self.starts.extend(shard.starts.tolist())
        self.masked_counts.extend([0] * len(ends))
        self.sources.append((shard.ids, disk_digest or shard.digest(), disk_digest is not None))

    def add_shard_file(self, path: Path) -> None:
        """Adds the documents of a shard on disk. Raises CheckpointError if it is missing or damaged."""
        with open_safetensors(path, ADVICE) as file:
            self.add_shard(TokenShard(*map(file.get_tensor, TokenShard._fields)), file.metadata()["digest"])

    def add_segment(
        self, dataset: TokenDataset, i: int, first: int, length: int, start: int, num_masked: int = 0
    ) -> None:
        """Adds a piece of a document of the same sources; ``num_masked``: of :meth:`count_masked`, 0 to learn them too."""
        self._source.append(dataset._source[i])
        self._begins.append(dataset._begins[i] + first)
        self.lengths.append(length)
        self.starts.append(start)
        self.masked_counts.append(num_masked)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Document:  # type: ignore[override]  # no slices
        learned = (self._marked(i) >= 0).tolist() if self.masked_counts[i] else None
        return Document(self.token_ids(i).tolist(), self.starts[i], learned)

    def token_ids(self, i: int, first: int = 0, count: int = 1 << 40) -> torch.Tensor:
        """A document's tokens from its ``first`` on, ``count`` at most."""
        marked = self._marked(i, first, count)
        return torch.where(marked < 0, ~marked, marked)

    def count_masked(self, i: int, first: int, count: int) -> int:
        """Counts the tokens of a document from ``first`` on that are marked as not learned."""
        return int((self._marked(i, first, count) < 0).sum())

    def _marked(self, i: int, first: int = 0, count: int = 1 << 40) -> torch.Tensor:
        """The same as :meth:`token_ids`, with ~id for tokens that are not learned."""
        begin = self._begins[i]
        return self.sources[self._source[i]][0][begin + first : begin + min(first + count, self.lengths[i])]

    def digest(self) -> str:
        """A name for the documents that depends on their content; a resumed run must have the same."""
        hashed = hashlib.sha256(repr([digest for _, digest, _ in self.sources]).encode())
        for column in (self._source, self._begins, self.lengths, self.starts, self.masked_counts):
            hashed.update(column.tobytes())
        return hashed.hexdigest()[:16]


def split_dataset(
    dataset: TokenDataset, skipped: SkipCounts, config: RunConfig, levels: int, max_target_length: int = 1 << 30
) -> tuple[TokenDataset, TokenDataset]:
    """The documents to train on and to measure on, cut, filtered and split as the settings say: no passage is in both.

    Plain text is cut into pieces of ``max_length`` tokens. A document with a prompt is cut at its end, and left out if
    nothing learned would remain; for a language model it is cut at its beginning, and with ``learn_prompts`` one that
    was not cut is learned from its second token on. The pieces of a text are learned, or held out, together. Which it
    is depends on how a text begins behind what too many texts begin with to be one passage (a system prompt); one
    passage at least is held out, if there are two.

    Args:
        skipped: counts the documents that are left out.
        levels: a document must have more learned tokens than this (the largest shift).
        longest: tokens that the target reads at most.

    Raises:
        PromptError: there is nothing to train on, or nothing to measure on.
    """
    max_length, keep_end = min(config.max_length, max_target_length), isinstance(config, LmConfig)
    learn_prompts = isinstance(config, LmConfig) and config.learn_prompts
    learned, measured, begins = TokenDataset(dataset.sources), TokenDataset(dataset.sources), _own_beginnings(dataset)
    shares = array("d", (_share(dataset, i, begins[i], "held out") for i in range(len(dataset))))
    least = sorted(set(shares))[:2]
    measured_below = max(config.held_out, least[1]) if config.held_out and len(least) > 1 else config.held_out
    for i, (length, start) in enumerate(zip(dataset.lengths, dataset.starts, strict=True)):
        # Where each piece begins, how long it is, and its start.
        if start == 1:
            pieces = [(cut, min(max_length, length - cut), 1) for cut in range(0, length - 1, max_length)]
        elif keep_end:
            cut = max(0, length - max_length)
            pieces = [(cut, length - cut, max(1, start - cut))]
        elif start < max_length:
            pieces = [(0, min(length, max_length), start)]
        else:
            skipped["with a prompt longer than max_length"] += 1
            continue
        # A document is assigned by how it begins, with all its pieces.
        side = measured if shares[i] < measured_below else learned
        for first, count, learned_from in pieces:
            at = first if first and start == 1 else begins[i]
            if config.sample < 1 and _share(dataset, i, at, "sample") >= config.sample:
                continue
            entire = learn_prompts and side is learned and count < max_length
            answers_alone = start > 1 and config.learn == "answers" and not entire
            context = dataset.count_masked(i, first + learned_from, count - learned_from) if answers_alone else 0
            if count < config.min_length or count - learned_from - context <= levels:
                skipped["too short"] += 1
            else:
                side.add_segment(dataset, i, first, count, 1 if entire else learned_from, context)
    left = f"left out: {skipped}; held out: {len(measured)}"
    if not len(learned):
        raise PromptError(f"Nothing to train on ({left}): give more rows with `text`, `messages` or `tokens`.")
    if config.held_out and not len(measured):
        raise PromptError(
            f"Nothing is held out of {len(learned)} documents to measure on ({left}): raise held_out, give more texts, "
            "or set held_out=0, which keeps the last draft as the best."
        )
    return learned, measured


def _own_beginnings(whole: TokenDataset) -> array[int]:
    """Where each document begins to say what the others do not: 0, or behind a beginning that many have in common."""
    begins, groups = array("i", bytes(4 * len(whole))), [torch.arange(len(whole))]
    many = max(2, min(MAX_SAME_PREFIX, len(whole) / 2))
    while groups:
        members = groups.pop()
        numbers = (_number(whole.token_ids(i, begins[i], PASSAGE_PREFIX)) for i in members.tolist())
        passages = torch.tensor(array("q", numbers))
        values, counts = passages.unique(return_counts=True)
        for value in values[counts >= many].tolist():
            same = members[passages == value]
            first = int(same[0])
            shared = whole.token_ids(first, begins[first], MAX_SHARED_PREFIX).tolist()
            for i in same.tolist():
                shared = shared[: common_prefix_len(shared, whole.token_ids(i, begins[i], len(shared)).tolist())]
            if shared:
                for i in same.tolist():
                    begins[i] += len(shared)
                groups.append(same)
    return begins


def _number(tokens: torch.Tensor, purpose: str = "") -> int:
    """A number of 48 bits for some tokens."""
    return int.from_bytes(hashlib.sha256(f"{purpose}{tokens.tolist()}".encode()).digest()[:6], "big")


def _share(whole: TokenDataset, i: int, first: int, purpose: str) -> float:
    """A number in [0, 1) that depends on how a document, or a piece of it, begins."""
    return _number(whole.token_ids(i, first, PASSAGE_PREFIX), purpose) / 2**48


def most_frequent_tokens(
    documents: Iterable[Document], vocab_size: int, count: int, always: Iterable[int] = ()
) -> torch.Tensor:
    """The ``count`` most frequent learned tokens, in increasing order of id: a draft's own, smaller vocabulary.

    A draft spends much of its time in the head, which is several times smaller so. A token outside the vocabulary is
    never proposed; the output stays exact. Tokens before a document's ``start`` count a little, so that they break
    ties: a draft copies from them. The ids ``always`` are included in any case (end of sequence).
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for document in documents:
        tokens, weights = (
            torch.tensor(document.token_ids),
            torch.full((len(document.token_ids),), 0.05, dtype=torch.float64),
        )
        weights[document.start :] = (
            1 if document.loss_mask is None else torch.tensor(document.loss_mask[document.start :])
        )
        counts += torch.bincount(tokens, weights, vocab_size)
    counts[list(always)] = float("inf")
    return counts.argsort(descending=True, stable=True)[:count].sort().values


# --- files and shards ---


def read_dataset(
    sources: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    skipped: SkipCounts,
    vocab_size: int,
    template: Mapping[str, Any] | None = None,
) -> TokenDataset:
    """The documents of files and folders, and of folders of shards, which are not read into memory.

    Raises CheckpointError if a folder's shards are not finished, are damaged, or are of another tokenizer.
    """
    found = TokenDataset()
    for folder in map(Path, sources):
        if not ((folder / INDEX_FILE).is_file() and shard_paths(folder)):
            found.add_shard(
                TokenShard.from_documents(encode_documents([folder], tokenizer, skipped, vocab_size, template=template))
            )
            continue
        if "rows" not in _index(folder, tokenizer):
            raise CheckpointError(f"{folder} is not finished: the same `longdraft train data` command continues it.")
        for path in shard_paths(folder):
            found.add_shard_file(path)
    return found


def write_shards(
    folder: Path,
    documents: Iterable[Document | None],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Writes the shards that a folder lacks; returns how many documents this call has added.

    Args:
        rows: the rows of the source from :func:`num_examples_done` on; None for one that cannot be used.
        progress: called now and then with the documents and tokens so far.
        stop: called as often; True ends the work, and whole shards are kept.

    Raises:
        CheckpointError: a shard cannot be written, or the folder's were encoded by another tokenizer.
        PromptError: there are no documents.
    """
    index, done, added, tokens = _index(folder, tokenizer), num_examples_done(folder), 0, 0
    waiting, size = list[Document](), 0

    def shard() -> None:
        packed = TokenShard.from_documents(waiting)
        with atomic_write(folder / f"tokens-{len(shard_paths(folder)):05d}.safetensors") as part:
            save_file(packed._asdict(), part, {"rows": f"{done}", "digest": packed.digest()})
        waiting.clear()

    for row in documents:
        done += 1
        if row is not None:
            waiting.append(row)
            added, tokens, size = added + 1, tokens + len(row.token_ids), size + len(row.token_ids)
        if size >= SHARD:
            shard()
            size = 0
        if done % 100 == 0:
            progress(added, tokens)
            if stop():
                return added
    if waiting:
        shard()
    if not shard_paths(folder):
        raise PromptError("There is nothing to write: rows need `text`, `messages` or `tokens`.")
    with atomic_write(folder / INDEX_FILE) as part:
        part.write_text(json.dumps(index | {"rows": done}), encoding="utf-8")
    progress(added, tokens)
    return added


def shard_paths(folder: Path) -> list[Path]:
    """The shards' files, in order."""
    return sorted(folder.glob("tokens-*.safetensors"))


def num_examples_done(folder: Path) -> int:
    """Rows of the source that a folder's shards hold or have left out."""
    for path in shard_paths(folder)[-1:]:
        with open_safetensors(path, ADVICE) as file:
            return int(file.metadata()["rows"])
    return 0


def _index(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The folder's index, which is begun if there is none. Raises CheckpointError if another tokenizer encoded it."""
    path = folder / INDEX_FILE
    own = {"tokenizer": hashlib.sha256(repr(tokenizer(_PROBE)["input_ids"]).encode()).hexdigest()[:16]}
    if not path.exists():
        with atomic_write(path) as part:
            part.write_text(json.dumps(own), encoding="utf-8")
    with file_errors(path, f"{path} cannot be read", ADVICE):
        index = read_json(path)
    if index.get("tokenizer") != own["tokenizer"]:
        raise CheckpointError(f"{folder} was encoded by another tokenizer: encode the text again for this target.")
    return index
