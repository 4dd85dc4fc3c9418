"""Several processes share a model, and the first one has the clients: it tells the others what is asked of it.

Each process has a worker that decodes the same requests, in the same order. All take a change in between the same two
rounds. The size of a message comes with the agreement that a round of the model begins with
(:class:`longdraft.model.sharded.Share`), so a round without news exchanges nothing more. Where no round was made since
the last message, the processes exchange its size by themselves. That is where they wait while nothing is decoded: in
the sockets of their hosts, which takes neither a core nor a GPU.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch

from longdraft.errors import LongdraftError
from longdraft.model.sharded import Share
from longdraft.native.boundary import WHOLE
from longdraft.serve.ticket import Change, Ticket

# An idle first process speaks up this often, so that the others know of its end even if a machine was switched off.
HEARTBEAT = 10.0
# Others are lost when they are silent for longer. Replies to a failure come at once, or another has not failed.
SILENCE, REPLY = 300.0, 30.0


class PeerLost(LongdraftError):
    """Another process that shares the model has ended, or is no longer in step: this one has to end too."""


class Wire:
    """Exchanges small things between the processes that have a share, on their hosts. All call the same methods.

    Raises:
        PeerLost: by each method, if another process has ended or does not answer.
    """

    def __init__(self, share: Share) -> None:
        self._share, ranks = share, torch.distributed.get_process_group_ranks(share.group)
        self._first = ranks[0]
        self._group = torch.distributed.new_group(ranks, timedelta(seconds=SILENCE), backend="gloo")

    def most(self, number: int) -> int:
        """The largest of the processes' numbers."""
        most = torch.tensor(number, **WHOLE)
        with self._kept():
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, self._group)
        return int(most)

    def first(self, message: bytes, size: int) -> bytes:
        """The first process's message of ``size`` bytes."""
        told = torch.frombuffer(bytearray(message or size), dtype=torch.uint8)
        with self._kept():
            torch.distributed.broadcast(told, self._first, self._group)
        return told.numpy().tobytes()

    def meet(self) -> None:
        """Waits for all others, but not for long."""
        with self._kept():
            torch.distributed.monitored_barrier(self._group, timedelta(seconds=REPLY), wait_all_ranks=False)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"Another of the {self._share.size} processes that share the model has ended or does not answer, so "
                f"process {self._share.rank} ends too: start the server again."
            ) from error


class Telling:
    """Args:
    wire: connects the processes. tokenizer: the model's, which is there in all processes and is not told.
    """

    def __init__(self, share: Share, wire: Wire, tokenizer: Any) -> None:
        self._share, self._wire, self._tokenizer = share, wire, tokenizer
        # The first process has these: the changes that the others are told next.
        self._changes: list[Change] = []
        self._message = b""
        # The others have these: tickets that have not ended.
        self._tickets: WeakValueDictionary[int, Ticket] = WeakValueDictionary()

    def exchange(self, asked: Callable[[float], list[Change]], idle: bool) -> list[Change]:
        """Returns the changes that all processes take in now, the same in all.

        Args:
            asked: takes what was asked of the first process, after waiting for it for some seconds.
            idle: nothing is decoded, so wait for a change; now and then there is none.

        Raises:
            PeerLost: another process has ended or does not answer.
        """
        first = self._share.rank == 0
        size, self._share.heard = self._share.heard, None
        if size is None:  # no round was agreed on, so the others do not know of a message
            if first:
                self._tell(self._changes + asked(HEARTBEAT if idle and not self._changes else 0.0))
            size = self._wire.most(len(self._message))
        message = self._wire.first(self._message, size) if size else b""
        if not first:
            return self._read(message)
        changes = self._changes
        self._tell(asked(0.0))
        return changes

    def check_all_failed(self, error: Exception) -> None:
        """Returns if all processes have failed where this one has: they are still in step.

        Raises:
            PeerLost: another process has not failed, or has ended.
        """
        try:
            self._wire.meet()
        except PeerLost as lost:
            if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
                raise  # it has failed because the other has ended
            raise PeerLost(f"{lost} It has failed alone: {type(error).__name__}: {error}") from error

    def _tell(self, changes: list[Change]) -> None:
        """Has changes told to the others, with the next agreement or without one."""
        self._changes, self._message = changes, b""
        if changes:
            written = io.BytesIO()
            _Pickler(written, self._tokenizer).dump([_told(change) for change in changes])
            self._message = written.getvalue()
        self._share.said = len(self._message)

    def _read(self, message: bytes) -> list[Change]:
        changes = []
        for kind, number, method, twin in _Unpickler(io.BytesIO(message), self._tokenizer).load() if message else ():
            ticket = self._tickets.get(number)
            if kind == "submit":
                self._tickets[number] = ticket = Ticket(twin, method, lambda update: None, number=number)
            changes.append(Change(kind, ticket))
        return changes


def _told(change: Change) -> tuple[Any, ...]:
    ticket = change.ticket
    if ticket is None:
        return change.kind, None, None, None
    return change.kind, ticket.number, ticket.method, ticket.twin if change.kind == "submit" else None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tokenizer: Any) -> None:
        super().__init__(file)
        self._tokenizer = tokenizer

    def persistent_id(self, thing: Any) -> str | None:
        return "tokenizer" if thing is self._tokenizer else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tokenizer: Any) -> None:
        super().__init__(file)
        self._tokenizer = tokenizer

    def persistent_load(self, name: str) -> Any:
        return self._tokenizer
