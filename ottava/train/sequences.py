"""Sequences of T tokens, cut from a stream of documents, one per document, or random.

Each kind gives sequence i as (token ids int64 [T], document number int32 [T]) and a fingerprint
that changes with anything that changes a sequence.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One side of the split: its tokens end to end, and where each document starts (and ends)."""

    tokens: np.ndarray
    starts: np.ndarray


def stream_of(tokens: np.ndarray, spans: np.ndarray) -> Stream:
    """The documents tokens[begin:end] for every row (begin, end) of `spans`, end to end."""
    pieces = [tokens[a:b] for a, b in spans] or [tokens[:0]]
    lengths = spans[:, 1] - spans[:, 0]
    return Stream(tokens=np.concatenate(pieces), starts=np.concatenate([[0], np.cumsum(lengths)]))


class PackedSequences:
    """Sequence i is tokens [i * T, (i + 1) * T) of the stream; the last, partial one is dropped."""

    def __init__(self, stream: Stream, length: int) -> None:
        self.stream, self.length = stream, length

    def __len__(self) -> int:
        return len(self.stream.tokens) // self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids int64 [T], document number int32 [T])."""
        begin = index * self.length
        where = np.arange(begin, begin + self.length)
        documents = np.searchsorted(self.stream.starts, where, side="right") - 1
        ids = self.stream.tokens[begin : begin + self.length].astype(np.int64)
        return ids, documents.astype(np.int32)

    def fingerprint(self) -> int:
        """A number that changes with any token or boundary."""
        return checksum(self.stream.starts.tobytes(), self.stream.tokens.tobytes(), b"packed")


class SeparateSequences:
    """Sequence i is the start of document i, filled up with separators (document number -1)."""

    def __init__(self, stream: Stream, length: int, separator: int) -> None:
        self.stream, self.length, self.separator = stream, length, separator

    def __len__(self) -> int:
        return len(self.stream.starts) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids int64 [T], document number int32 [T])."""
        begin, end = self.stream.starts[index : index + 2]
        size = min(int(end - begin), self.length)
        ids = np.full(self.length, self.separator, np.int64)
        ids[:size] = self.stream.tokens[begin : begin + size]
        documents = np.full(self.length, -1, np.int32)
        documents[:size] = index
        return ids, documents

    def fingerprint(self) -> int:
        """A number that changes with any token or boundary."""
        return checksum(self.stream.starts.tobytes(), self.stream.tokens.tobytes(), b"separate")


class RandomSequences:
    """Uniform token ids below `vocab_size`; sequence i depends on (seed, side, i) alone."""

    def __init__(self, vocab_size: int, length: int, seed: int, side: int) -> None:
        self.vocab_size, self.length, self.seed, self.side = vocab_size, length, seed, side

    def __len__(self) -> int:
        return 2**40  # never runs out

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids int64 [T], document number 0 int32 [T])."""
        draw = np.random.Generator(np.random.Philox(key=[self.seed, 2 * index + self.side]))
        ids = draw.integers(0, self.vocab_size, self.length, dtype=np.int64)
        return ids, np.zeros(self.length, np.int32)

    def fingerprint(self) -> int:
        """A number that changes with the vocabulary, the seed or the side."""
        return checksum(f"random {self.vocab_size} {self.seed} {self.side}".encode())


Sequences = PackedSequences | SeparateSequences | RandomSequences


def checksum(*parts: bytes) -> int:
    """CRC-32 of all parts in a row."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
