"""What this package is measured against, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longdraft.bench import llama_peer
from longdraft.bench.assistant import assistant
from longdraft.bench.contenders import Contender
from longdraft.bench.hf import AssistantModel, Generate, PromptLookup
from longdraft.bench.llama_peer import LlamaCpp
from longdraft.host.runner import TargetRunner


@dataclass(frozen=True)
class Sources:
    """Where peers have their own weights from.

    Attributes:
        assistant: draft folder, or folder or hub id of a model of transformers; None: the shipped draft.
        llama_cpp_model: GGUF file; None: that of the embedded model.
    """

    assistant: str | Path | None = None
    llama_cpp_model: Path | None = None


@dataclass(frozen=True)
class Peer:
    """Attributes:
    make: the contender on a target.
    batched: it takes several prompts at once.
    takes: the attribute of :class:`Sources` that it reads, if any.
    check: refuses what cannot run, before a model is loaded.
    """

    make: Callable[[TargetRunner, Sources], Contender]
    batched: bool = False
    takes: str = ""
    check: Callable[[Sources], None] = lambda sources: None


def _assisted(target: TargetRunner, sources: Sources) -> Contender:
    return AssistantModel(target.model, *assistant(target, sources.assistant))


def _llama_cpp(target: TargetRunner, sources: Sources) -> Contender:
    return LlamaCpp(sources.llama_cpp_model, target.vocab_size, target.device)


PEERS = {
    Generate.name: Peer(lambda target, sources: Generate(target.model), batched=True),
    PromptLookup.name: Peer(lambda target, sources: PromptLookup(target.model)),
    AssistantModel.name: Peer(_assisted, takes="assistant"),
    LlamaCpp.name: Peer(_llama_cpp, takes="llama_cpp_model", check=lambda s: llama_peer.check(s.llama_cpp_model)),
}
HF = Generate.name
"""The peer that every row is compared with."""


def check(names: tuple[str, ...], sources: Sources, largest_batch: int) -> None:
    """Refuses peers that cannot run as they are asked to.

    Raises:
        ValueError: a source that none of them reads, or a batch for one that takes one prompt at a time.
        CapabilityError, CheckpointError: as the peer's own check says.
    """
    asked = {name: PEERS[name] for name in names if name in PEERS}
    for name, peer in PEERS.items():
        if peer.takes and getattr(sources, peer.takes) is not None and name not in asked:
            raise ValueError(f"--{peer.takes.replace('_', '-')} is for {name}: add it to --methods")
    if largest_batch > 1 and (single := [name for name, peer in asked.items() if not peer.batched]):
        raise ValueError(f"{', '.join(single)} can only decode one prompt at a time: leave out, or give --batch 1")
    for peer in asked.values():
        peer.check(sources)
