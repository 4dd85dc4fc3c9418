"""Peers that this package is measured against, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longdraft.bench import llama_peer
from longdraft.bench.contenders import Contender
from longdraft.bench.hf import AssistantModel, Eager, Generate, PromptLookup
from longdraft.bench.llama_peer import LlamaCpp
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.errors import CapabilityError
from longdraft.model.runner import TargetRunner


@dataclass(frozen=True)
class Sources:
    """Sources of the peers' own weights.

    Attributes:
        assistant: folder or hub id of a model of transformers, or a draft folder.
        gguf: GGUF file; None: that of the embedded model.
    """

    assistant: str | Path | None = None
    gguf: Path | None = None


@dataclass(frozen=True)
class Peer:
    """A kind of contender that is not ours.

    Attributes:
        make: makes the contender on a target.
        unpacked: it runs on the target's model object, which must not hold packed weights.
        batched: it takes several prompts at once.
        takes: the attribute of :class:`Sources` that it reads, if any.
        check: refuses what cannot run, before a model is loaded.
    """

    make: Callable[[TargetRunner, Sources], Contender]
    unpacked: bool = False
    batched: bool = False
    takes: str = ""
    check: Callable[[Sources], None] = lambda sources: None


def _assisted(target: TargetRunner, sources: Sources) -> AssistantModel:
    """``generate`` with the assistant, which must have the target's vocabulary.

    Raises:
        CapabilityError: none is named, or its head has a part of the vocabulary.
        CheckpointError: it cannot be read, or has another vocabulary.
    """
    draft = None if sources.assistant is None else SmallLMDraft.load(sources.assistant)
    bound = None if draft is None else draft.bound(target)
    if draft is None or bound is None or bound.ids is not None:
        raise CapabilityError(
            "hf-assisted needs a small language model whose head has all of the target's tokens: name one with "
            "--assistant DIR, or leave hf-assisted out."
        )
    return AssistantModel(target.model, bound.runner.model, draft.folder)


def _hf(make: Callable[[TargetRunner, Sources], Contender], batched: bool = False, takes: str = "") -> Peer:
    return Peer(make, unpacked=True, batched=batched, takes=takes)


PEERS = {
    Generate.name: _hf(lambda target, _: Generate(target.model), batched=True),
    Eager.name: _hf(lambda target, _: Eager(target.model), batched=True),
    PromptLookup.name: _hf(lambda target, _: PromptLookup(target.model)),
    AssistantModel.name: _hf(_assisted, takes="assistant"),
    LlamaCpp.name: Peer(
        lambda target, sources: LlamaCpp(sources.gguf, target.vocab_size, target.device),
        takes="gguf",
        check=lambda sources: llama_peer.check(sources.gguf),
    ),
}
HF = Generate.name
"""The peer that every row is compared with."""


def check(names: tuple[str, ...], sources: Sources, largest_batch: int) -> None:
    """Refuses peers that cannot run with these settings.

    Raises:
        ValueError: a source that none of them reads, or a batch for a peer that takes one prompt at a time.
        CapabilityError, CheckpointError: as the peer's own check says.
    """
    asked = {name: PEERS[name] for name in names if name in PEERS}
    for source in dict.fromkeys(peer.takes for peer in PEERS.values() if peer.takes):
        readers = [name for name, peer in PEERS.items() if peer.takes == source]
        if getattr(sources, source) is not None and not asked.keys() & readers:
            raise ValueError(f"--{source} is for {', '.join(readers)}: add what you want of it to --methods")
    if largest_batch > 1 and (single := [name for name, peer in asked.items() if not peer.batched]):
        raise ValueError(f"{', '.join(single)} can only decode one prompt at a time: leave out, or give --batch 1")
    for peer in asked.values():
        peer.check(sources)
