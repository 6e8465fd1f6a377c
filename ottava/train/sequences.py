"""Sequences of T tokens, cut from a stream of documents, one per document, or random; and in which
order they come.

Each kind gives sequence i as (token ids int64 [T], document number int32 [T], whether the token has
loss bool [T]) and a fingerprint that changes with anything that changes a sequence.
"""

from __future__ import annotations

import zlib

import numpy as np

Sequence = tuple[np.ndarray, np.ndarray, np.ndarray]


class Stream:
    """One side of the split: the documents source[begin:end] for every row (begin, end) of `spans`,
    end to end. Nothing is copied before it is read.

    source: tokens, perhaps a mapped file; counts: which of them have loss, None for all. origin:
    what the source is, for fingerprints.
    """

    def __init__(
        self,
        source: np.ndarray,
        spans: np.ndarray,
        counts: np.ndarray | None = None,
        origin: int = 0,
    ) -> None:
        self.source, self.spans, self.counts, self.origin = source, spans, counts, origin
        lengths = spans[:, 1] - spans[:, 0]
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def tokens(self) -> np.ndarray:
        """All of them, copied."""
        return np.concatenate([self.source[a:b] for a, b in self.spans] or [self.source[:0]])

    def read(self, begin: int, end: int) -> Sequence:
        """Tokens [begin, end) as (ids int64, document number int32, has loss bool)."""
        ids = np.empty(end - begin, np.int64)
        documents = np.empty(end - begin, np.int32)
        counts = np.ones(end - begin, bool)
        d = int(np.searchsorted(self.starts, begin, side="right")) - 1
        at = begin
        while at < end:
            until = min(end, int(self.starts[d + 1]))
            first = int(self.spans[d, 0]) + at - int(self.starts[d])
            here, there = slice(at - begin, until - begin), slice(first, first + until - at)
            ids[here], documents[here] = self.source[there], d
            if self.counts is not None:
                counts[here] = self.counts[there]
            at, d = until, d + 1
        return ids, documents, counts

    def fingerprint(self) -> int:
        """A number that changes with any token, mark or boundary."""
        return checksum(self.spans.tobytes(), str(self.origin).encode())


class PackedSequences:
    """Sequence i is tokens [i * T, (i + 1) * T) of the stream; the last, partial one is dropped."""

    def __init__(self, stream: Stream, length: int) -> None:
        self.stream, self.length = stream, length

    def __len__(self) -> int:
        return len(self.stream) // self.length

    def __getitem__(self, index: int) -> Sequence:
        """See the module."""
        return self.stream.read(index * self.length, (index + 1) * self.length)

    def fingerprint(self) -> int:
        """A number that changes with any token or boundary."""
        return checksum(b"packed", of=self.stream.fingerprint())


class SeparateSequences:
    """Sequence i is the start of document i, filled up with separators (document number -1)."""

    def __init__(self, stream: Stream, length: int, separator: int) -> None:
        self.stream, self.length, self.separator = stream, length, separator

    def __len__(self) -> int:
        return len(self.stream.spans)

    def __getitem__(self, index: int) -> Sequence:
        """See the module."""
        begin, end = map(int, self.stream.starts[index : index + 2])
        size = min(end - begin, self.length)
        ids = np.full(self.length, self.separator, np.int64)
        documents = np.full(self.length, -1, np.int32)
        counts = np.zeros(self.length, bool)
        ids[:size], documents[:size], counts[:size] = self.stream.read(begin, begin + size)
        return ids, documents, counts

    def fingerprint(self) -> int:
        """A number that changes with any token or boundary."""
        return checksum(b"separate", of=self.stream.fingerprint())


class RandomSequences:
    """Uniform token ids below `vocab_size`; sequence i depends on (seed, side, i) alone."""

    def __init__(self, vocab_size: int, length: int, seed: int, side: int) -> None:
        self.vocab_size, self.length, self.seed, self.side = vocab_size, length, seed, side

    def __len__(self) -> int:
        return 2**40  # never runs out

    def __getitem__(self, index: int) -> Sequence:
        """See the module; one document, 0, and loss on all of it."""
        draw = np.random.Generator(np.random.Philox(key=[self.seed, 2 * index + self.side]))
        ids = draw.integers(0, self.vocab_size, self.length, dtype=np.int64)
        return ids, np.zeros(self.length, np.int32), np.ones(self.length, bool)

    def fingerprint(self) -> int:
        """A number that changes with the vocabulary, the seed or the side."""
        return checksum(f"random {self.vocab_size} {self.seed} {self.side}".encode())


Sequences = PackedSequences | SeparateSequences | RandomSequences


class Passes:
    """The sequences of one source, epoch after epoch, each epoch in an order of its own if shuffled.

    Which one comes when is a pure function of (seed, number).
    """

    def __init__(self, sequences: Sequences, seed: int, *, shuffle: bool = False) -> None:
        self.sequences, self.seed, self.shuffle = sequences, seed, shuffle
        self.length = sequences.length
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.sequences)

    def at(self, number: int) -> Sequence:
        """Sequence `number`, counted without end."""
        epoch, index = divmod(number, len(self.sequences))
        if self.shuffle:
            if self._order[0] != epoch:
                self._order = (epoch, shuffled(len(self.sequences), self.seed, epoch))
            index = int(self._order[1][index])
        return self.sequences[index]

    def fingerprint(self) -> int:
        """A number that changes with any sequence and with their order."""
        seed = self.seed if self.shuffle else None
        return checksum(f"{self.sequences.fingerprint()} {self.length} {seed}".encode())


class Mixture:
    """Several sources by weight: of every 1,024 sequences each gives its share, evenly spread.

    Each source goes through its own epochs. Which sequence comes when is a pure function of the
    number, so any prefix has the shares to within one sequence a source.
    """

    PERIOD = 1024

    def __init__(self, parts: list[Passes], weights: list[float]) -> None:
        self.parts, self.length = parts, parts[0].length
        self.quota = apportioned(weights, self.PERIOD)
        due = [(np.arange(n) + 0.5) / n for n in self.quota]  # when in a period each is drawn
        whose = np.repeat(np.arange(len(parts)), self.quota)
        self._whose = whose[np.argsort(np.concatenate(due), kind="stable")]
        one = self._whose[:, None] == np.arange(len(parts))
        self._before = np.cumsum(one, axis=0) - one  # draws of each part earlier in the period

    def __len__(self) -> int:
        """Sequences until the first source begins its second epoch."""
        return min(self._place(k, len(part)) for k, part in enumerate(self.parts))

    def _place(self, k: int, own: int) -> int:
        """Where in the mixture part k's sequence `own` comes."""
        period, rest = divmod(own, int(self.quota[k]))
        return period * self.PERIOD + int(np.flatnonzero(self._whose == k)[rest])

    def at(self, number: int) -> Sequence:
        """Sequence `number`, counted without end."""
        period, place = divmod(number, self.PERIOD)
        k = int(self._whose[place])
        return self.parts[k].at(period * int(self.quota[k]) + int(self._before[place, k]))

    def fingerprint(self) -> int:
        """A number that changes with any sequence and with their order."""
        parts = " ".join(str(p.fingerprint()) for p in self.parts)
        return checksum(f"mix {parts} {self.quota.tolist()}".encode())


def apportioned(weights: list[float], total: int) -> np.ndarray:
    """Whole numbers int64 in proportion to `weights` that add up to `total` (largest remainders)."""
    exact = np.array(weights, np.float64) / sum(weights) * total
    whole = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[: total - int(whole.sum())]] += 1
    return whole


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count): the order of a hash, the same on every machine and version."""
    mask = 2**64 - 1
    start = _mix(np.array([(seed * 0x9E3779B97F4A7C15 + epoch + 1) & mask], np.uint64))
    return np.argsort(_mix(np.arange(count, dtype=np.uint64) ^ start), kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer on uint64, with its increment."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def checksum(*parts: bytes, of: int = 0) -> int:
    """CRC-32 of all parts in a row, going on from `of`."""
    value = of
    for part in parts:
        value = zlib.crc32(part, value)
    return value
