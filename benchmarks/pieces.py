"""Splits large files into pieces for a machine that takes small transfers only, and joins them there.

    python benchmarks/pieces.py split FILE... --out PIECES [--size 28]      # here; at most 60 MiB a piece
    python benchmarks/pieces.py join PIECES --out FOLDER                    # there, after each transfer

Each FILE becomes FILE.000, FILE.001, ... and FILE.pieces.json, which names the pieces with their SHA-256 and goes along
with every transfer. `join` takes what has come into FOLDER/FILE.part, so pieces may be deleted behind it. It checks
each piece, says which are missing, and names the file only when all of it is right. Both go on where they were cut off.

Exit code of `join`: 0 when all files are there, 3 while pieces are missing, 1 where something is damaged.
Nothing but Python's standard library is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

MIB = 2**20
MOST = 60
BLOCK = 4 * MIB
MANIFEST = ".pieces.json"


class PieceError(Exception):
    """A piece or a list of pieces that cannot be used. The message says what to do."""


@dataclass(frozen=True)
class Piece:
    """A piece: its file's name, its place in the whole file in bytes, and its SHA-256."""

    name: str
    begin: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Pieces:
    """A split file: its name, bytes, SHA-256 and pieces in order."""

    name: str
    size: int
    sha256: str
    pieces: tuple[Piece, ...]

    @classmethod
    def read(cls, path: Path) -> Pieces:
        """Reads a list of pieces.

        Raises:
            PieceError: it is damaged.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            whole = cls(**found | {"pieces": tuple(Piece(**piece) for piece in found["pieces"])})
            ends = [0, *(piece.begin + piece.size for piece in whole.pieces)]
            names = [whole.name, *(piece.name for piece in whole.pieces)]
            right = [piece.begin for piece in whole.pieces] == ends[:-1] and ends[-1] == whole.size
            if not right or any(Path(name).name != name for name in names):
                raise ValueError("its pieces do not make up the file")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PieceError(f"{path} is damaged ({error}): transfer it again.") from error
        return whole


def split(file: Path, out: Path, size: int) -> Pieces:
    """Splits a file. Pieces that are there already and right are left alone.

    Args:
        size: bytes of a piece at most.

    Raises:
        PieceError: no such file, or an empty one.
    """
    if not file.is_file() or not file.stat().st_size:
        raise PieceError(f"{file} is no file with anything in it.")
    out.mkdir(parents=True, exist_ok=True)
    total, whole, pieces = file.stat().st_size, hashlib.sha256(), []
    with file.open("rb") as source:
        for number, begin in enumerate(range(0, total, size)):
            length, own = min(size, total - begin), hashlib.sha256()
            for block in _blocks(source, begin, length):
                whole.update(block)
                own.update(block)
            piece = Piece(f"{file.name}.{number:03d}", begin, length, own.hexdigest())
            pieces.append(piece)
            if not _is_there(out / piece.name, piece):
                with _appearing(out / piece.name) as target:
                    for block in _blocks(source, begin, length):
                        target.write(block)
    found = Pieces(file.name, total, whole.hexdigest(), tuple(pieces))
    with _appearing(out / f"{file.name}{MANIFEST}") as target:
        target.write((json.dumps(asdict(found), indent=1) + "\n").encode())
    return found


def join(manifest: Path, out: Path) -> list[str]:
    """Takes the pieces beside a list of pieces into a file; with the last one, the file gets its name.

    Returns:
        Names of the pieces that are missing.

    Raises:
        PieceError: the list, a piece or the whole file is damaged.
    """
    whole = Pieces.read(manifest)
    file, part = out / whole.name, out / f"{whole.name}.part"
    if file.exists():
        if file.stat().st_size == whole.size and _digest(file, 0, whole.size) == whole.sha256:
            return []
        raise PieceError(f"{file} is there and is another file: move it away.")
    out.mkdir(parents=True, exist_ok=True)
    part.touch()
    missing = []
    with part.open("r+b") as target:
        for piece in whole.pieces:
            # What has been taken before is known by its sum alone.
            if _digest(part, piece.begin, piece.size) == piece.sha256:
                continue
            come = manifest.with_name(piece.name)
            if not come.exists():
                missing.append(piece.name)
                continue
            if not _is_there(come, piece):
                raise PieceError(f"{come} is damaged or of another file: transfer it again, with {manifest.name}.")
            target.seek(piece.begin)
            with come.open("rb") as source:
                shutil.copyfileobj(source, target, BLOCK)
            target.flush()
        if not missing:
            target.truncate(whole.size)
    if not missing:
        if _digest(part, 0, whole.size) != whole.sha256:
            raise PieceError(f"{part} is not the file that was split: delete it and transfer all pieces again.")
        part.replace(file)
    return missing


def _blocks(source: BinaryIO, begin: int, size: int) -> Iterator[bytes]:
    """Yields bytes [begin, begin + size) of a file; fewer where it ends before."""
    source.seek(begin)
    while size and (block := source.read(min(size, BLOCK))):
        size -= len(block)
        yield block


def _digest(file: Path, begin: int, size: int) -> str:
    found = hashlib.sha256()
    with file.open("rb") as source:
        for block in _blocks(source, begin, size):
            found.update(block)
    return found.hexdigest()


def _is_there(file: Path, piece: Piece) -> bool:
    return file.exists() and file.stat().st_size == piece.size and _digest(file, 0, piece.size) == piece.sha256


class _appearing:
    """Opens a file for writing that appears under its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(f".{path.name}.part")

    def __enter__(self) -> BinaryIO:
        self._file = self._part.open("wb")
        return self._file

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split", help="make pieces")
    one.add_argument("files", nargs="+", type=Path)
    one.add_argument("--out", type=Path, required=True, help="folder of the pieces")
    one.add_argument("--size", type=int, default=28, help=f"MiB of a piece, {MOST} at most")
    two = commands.add_parser("join", help="take pieces that have come")
    two.add_argument("pieces", type=Path, help="folder of the pieces")
    two.add_argument("--out", type=Path, required=True, help="folder of the files")
    options = parser.parse_args(words)
    try:
        if options.command == "split":
            if not 1 <= options.size <= MOST:
                raise PieceError(f"--size must be from 1 to {MOST} MiB, got {options.size}.")
            for file in options.files:
                found = split(file, options.out, options.size * MIB)
                print(f"{found.name}: {len(found.pieces)} pieces in {options.out}, with {found.name}{MANIFEST}")
            return 0
        manifests = sorted(options.pieces.glob(f"*{MANIFEST}"))
        if not manifests:
            raise PieceError(f"{options.pieces} holds no list of pieces (*{MANIFEST}): it goes with every transfer.")
        left = {manifest.name.removesuffix(MANIFEST): join(manifest, options.out) for manifest in manifests}
    except (PieceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for name, missing in left.items():
        print(f"{name}: " + (f"{len(missing)} pieces missing: {', '.join(missing)}" if missing else "complete"))
    return 3 if any(left.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
