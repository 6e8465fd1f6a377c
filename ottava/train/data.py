"""Tokens in order: documents become one stream, the stream becomes sequences, sequences batches.

The whole tokenised text is one array in memory (2 bytes a token up to 65,536 token ids). Which
sequence comes when is a pure function of (seed, epoch, index), so a position is one number, and a
run that stopped continues with the batch that it would have seen.

Labels follow Hugging Face's convention: `labels[b, t]` is the token at t itself and the model
shifts. A position is -100 where no token of the same document precedes it in the sequence, so no
label crosses a document boundary, and `num_valid` counts exactly the terms of the loss.

B sequences, T tokens in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..config import Data, Run
from .sequences import (
    PackedSequences,
    RandomSequences,
    SeparateSequences,
    Sequences,
    Stream,
    checksum,
    stream_of,
)
from .sources import DataError, read_documents, source_files

__all__ = ["DataError", "Loader", "TokenData", "Tokenizer", "load_data"]

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to token ids. `separator` ends every document and fills short sequences."""

    name: str
    vocab_size: int  # ids are below this
    separator: int
    encode: Callable[[list[bytes]], list[np.ndarray]]  # UTF-8 documents -> 1-D integer arrays


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """The two sides of the split, ready to draw from. `validation` is None when nothing is held out."""

    tokenizer: Tokenizer | None  # None for random tokens
    vocab_size: int
    train: Loader
    validation: Loader | None
    summary: str  # one line: documents, tokens, sequences


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens of all documents end to end; document d is tokens[starts[d]:starts[d + 1]]."""

    tokens: np.ndarray  # uint16 or int32
    starts: np.ndarray  # int64, one more than documents
    tokenizer: Tokenizer


def load_data(run: Run, *, vocab_size: int | None = None) -> TokenData:
    """Read, tokenise, split and pack what `run.data` names.

    `vocab_size`: the model's; checked against the tokenizer, and the range of random tokens.
    Raises DataError (one line) for data that cannot be used.
    """
    data, batch = run.data, run.train.micro_batch
    if data.source == "random":
        size = vocab_size or 256
        both = [
            Loader(RandomSequences(size, data.sequence_length, run.seed, side), batch, run.seed)
            for side in (0, 1)
        ]
        held = both[1] if data.validation_fraction else None
        return TokenData(tokenizer=None, vocab_size=size, train=both[0], validation=held,
                         summary=f"random tokens below {size:,}")  # fmt: skip
    files = source_files(data)
    stamp = tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in files)
    corpus = _read_corpus(_reading(data), stamp)
    if vocab_size is not None and corpus.tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer: {corpus.tokenizer.name!r} has {corpus.tokenizer.vocab_size:,} ids but "
            f"the model's vocab_size is {vocab_size:,}; set "
            f"model.overrides.vocab_size={corpus.tokenizer.vocab_size}"
        )
    separator = corpus.tokenizer.separator
    kept, held = _split(corpus, data, run.seed)
    train = Loader(_sequences(kept, data, separator, "training"), batch, run.seed,
                   shuffle=data.shuffle)  # fmt: skip
    validation = held and Loader(_sequences(held, data, separator, "validation"), batch, run.seed)
    summary = (
        f"{len(corpus.starts) - 1:,} documents, {len(corpus.tokens):,} tokens "
        f"({corpus.tokenizer.name}); sequences of {data.sequence_length:,}: "
        f"{len(train.sequences):,} to train on, "
        f"{len(validation.sequences) if validation else 0:,} held out"
    )
    return TokenData(tokenizer=corpus.tokenizer, vocab_size=corpus.tokenizer.vocab_size,
                     train=train, validation=validation, summary=summary)  # fmt: skip


def _reading(data: Data) -> Data:
    """Only the keys that decide the token stream, so that runs that share them share it."""
    return Data(source=data.source, text_key=data.text_key, tokenizer=data.tokenizer,
                max_bytes=data.max_bytes)  # fmt: skip


@functools.lru_cache(maxsize=1)
def _read_corpus(data: Data, _stamp: tuple) -> Corpus:
    tokenizer = load_tokenizer(data.tokenizer)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    pieces: list[np.ndarray] = []
    separator = np.array([tokenizer.separator], dtype)
    for batch in _groups(read_documents(data), 1 << 24):
        for ids in tokenizer.encode(batch):
            if len(ids):
                pieces += [ids.astype(dtype, copy=False), separator]
    if not pieces:
        raise DataError(f"{data.source}: holds no text")
    lengths = np.array([len(p) for p in pieces[::2]], np.int64) + 1
    return Corpus(
        tokens=np.concatenate(pieces),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        tokenizer=tokenizer,
    )


def _groups(documents: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    """Lists of documents of about `size` bytes, so that text and tokens never exist both whole."""
    group: list[bytes] = []
    total = 0
    for document in documents:
        group.append(document)
        total += len(document)
        if total >= size:
            yield group
            group, total = [], 0
    if group:
        yield group


def load_tokenizer(name: str) -> Tokenizer:
    """ "bytes" (ids 0..255, separator 256), or a Hugging Face tokenizer folder or name."""
    if name == "bytes":
        return Tokenizer(
            name="bytes",
            vocab_size=257,
            separator=256,
            encode=lambda texts: [np.frombuffer(t, np.uint8) for t in texts],
        )
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the library raises many kinds; all mean the same here
        why = " ".join(str(error).split())[:200]
        raise DataError(f"data.tokenizer: {name!r} cannot be loaded: {why}") from None
    separator = next(
        (i for i in (hf.eos_token_id, hf.sep_token_id, hf.bos_token_id) if i is not None), None
    )
    if separator is None:
        raise DataError(
            f"data.tokenizer: {name!r} has no end-of-text token to separate documents with; set "
            "eos_token in its tokenizer_config.json"
        )

    def encode(texts: list[bytes]) -> list[np.ndarray]:
        ids = hf([t.decode() for t in texts], add_special_tokens=False, verbose=False,
                 return_attention_mask=False)["input_ids"]  # fmt: skip
        return [np.asarray(i, np.int32) for i in ids]

    top = max(len(hf), separator + 1)
    return Tokenizer(name=name, vocab_size=top, separator=separator, encode=encode)


def _split(corpus: Corpus, data: Data, seed: int) -> tuple[Stream, Stream | None]:
    """The stream to train on and the stream held out.

    Whole documents are held out, in seeded order, as long as they fit the share. Where that gives
    less than one sequence (one long text), the tail of the longest remaining document is added.
    """
    starts, share = corpus.starts, data.validation_fraction
    spans = np.stack([starts[:-1], starts[1:]], axis=1)
    if not share:
        return stream_of(corpus.tokens, spans), None
    target = max(int(len(corpus.tokens) * share), data.sequence_length)
    order = _shuffled(len(spans), seed, SPLIT)
    lengths = spans[:, 1] - spans[:, 0]
    held = np.zeros(len(spans), bool)
    size = 0
    for d in order:
        if size + lengths[d] <= target:
            held[d] = True
            size += int(lengths[d])
    kept, out = spans[~held], spans[held]
    if len(kept) and size < data.sequence_length:
        longest = int(np.argmax(kept[:, 1] - kept[:, 0]))
        begin, end = kept[longest]
        cut = max(end - (target - size), begin)
        kept[longest] = begin, cut
        out = np.concatenate([out, [[cut, end]]])
    return stream_of(corpus.tokens, kept[kept[:, 1] > kept[:, 0]]), stream_of(corpus.tokens, out)


def _sequences(stream: Stream, data: Data, separator: int, side: str) -> Sequences:
    if not data.pack:
        sequences = SeparateSequences(stream, data.sequence_length, separator)
    else:
        sequences = PackedSequences(stream, data.sequence_length)
    if not len(sequences):
        fix = "give more text, or lower data.sequence_length"
        if side == "validation":
            fix += ", or set data.validation_fraction=0"
        raise DataError(
            f"{data.source}: {len(stream.tokens):,} tokens for {side}, less than one sequence of "
            f"{data.sequence_length:,}; {fix}"
        )
    return sequences


class Loader:
    """Draws batches without end, epoch after epoch. `position` counts the sequences drawn, by all
    ranks: it is the same on each of them, and goes on under any other number of them."""

    rank, world = 0, 1

    def __init__(
        self, sequences: Sequences, batch: int, seed: int, *, shuffle: bool = False
    ) -> None:
        self.sequences, self.batch, self.seed, self.shuffle = sequences, batch, seed, shuffle
        self.position = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._fingerprint = checksum(
            f"{sequences.fingerprint()} {sequences.length} {seed if shuffle else None}".encode()
        )

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position / len(self.sequences)

    def __iter__(self) -> Loader:
        return self

    def share(self, rank: int, world: int) -> None:
        """Draw every world-th batch, from number `rank` on; the others are other ranks'."""
        self.rank, self.world = rank, world

    def __next__(self) -> dict[str, torch.Tensor | int]:
        """The next batch; see `batch_at`."""
        batch = self.batch_at(self.position + self.rank * self.batch)
        self.position += self.batch * self.world
        return batch

    def batch_at(self, position: int, size: int | None = None) -> dict[str, torch.Tensor | int]:
        """The batch that starts at `position`, on the CPU; `position` of the loader stays.

        input_ids int64 [B, T]; labels int64 [B, T], -100 where nothing is predicted; document_ids
        int32 [B, T], -1 on padding; num_valid: labels that count.
        """
        rows = [self._sequence(position + i) for i in range(size or self.batch)]
        ids, documents = (np.stack(column) for column in zip(*rows, strict=True))
        labels = ids.copy()
        labels[:, 0] = IGNORE
        labels[:, 1:][documents[:, 1:] != documents[:, :-1]] = IGNORE
        labels[documents < 0] = IGNORE
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "document_ids": torch.from_numpy(documents),
            "num_valid": int((labels != IGNORE).sum()),
        }

    def first(self, batches: int) -> Iterator[dict[str, torch.Tensor | int]]:
        """Up to `batches` batches from the start, each sequence once; `position` stays."""
        total = min(batches * self.batch, len(self.sequences))
        for begin in range(0, total, self.batch):
            yield self.batch_at(begin, min(self.batch, total - begin))

    def _sequence(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        epoch, index = divmod(number, len(self.sequences))
        if self.shuffle:
            if self._order[0] != epoch:
                self._order = (epoch, _shuffled(len(self.sequences), self.seed, epoch))
            index = int(self._order[1][index])
        return self.sequences[index]

    def state_dict(self) -> dict[str, int]:
        """The position, and a fingerprint of the data that it is a position in."""
        return {"position": self.position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position. Raises DataError if the data, its split or seed changed."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "data: not the data that the checkpoint was made with (text, tokenizer, "
                "sequence_length, validation_fraction, shuffle or seed changed); restore it, or "
                "start again with train.resume=never"
            )
        self.position = int(state["position"])


def positions_in_document(document_ids: torch.Tensor) -> torch.Tensor:
    """Positions int64 [B, T] that start from 0 at each document; from document_ids [B, T]."""
    steps = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    new = torch.ones_like(document_ids, dtype=torch.bool)
    new[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return steps - torch.where(new, steps, 0).cummax(dim=1).values


SPLIT = -1  # the "epoch" whose order decides what is held out


def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
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
