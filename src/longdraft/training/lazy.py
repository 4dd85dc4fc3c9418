"""Sequences whose items are made when they are read, so that millions of them take little memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class Lazy(Sequence[Item]):
    """A sequence that is defined by its length and by :meth:`item`."""

    @abstractmethod
    def item(self, i: int) -> Item:
        """Makes the item at a place from 0 on."""

    @overload
    def __getitem__(self, i: int) -> Item: ...
    @overload
    def __getitem__(self, i: slice) -> list[Item]: ...
    def __getitem__(self, i: int | slice) -> Item | list[Item]:
        return [self.item(j) for j in range(*i.indices(len(self)))] if isinstance(i, slice) else self.item(i)
