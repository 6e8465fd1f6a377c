"""Tokens in order: documents become one stream, the stream becomes sequences, sequences batches.

Tokens of a source lie in memory or in a mapped file (corpus.py; 2 bytes a token up to 65,536 token
ids). Which sequence comes when is a pure function of (seed, number), over all sources of a mix, so
a position is one number, and a run that stopped continues with the batch that it would have seen.

Labels follow Hugging Face's convention: `labels[b, t]` is the token at t itself and the model
shifts. A position is -100 where no token of the same document precedes it in the sequence, and where
the token belongs to no answer of a conversation; so no label crosses a document boundary, and
`num_valid` counts exactly the terms of the loss.

B sequences, T tokens in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..config import Data, Run, data_parts
from .corpus import Corpus, read_corpus
from .sequences import (
    Mixture,
    PackedSequences,
    Passes,
    RandomSequences,
    SeparateSequences,
    Sequences,
    Stream,
    shuffled,
)
from .sources import DataError, stamp_of
from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["DataError", "Loader", "TokenData", "Tokenizer", "load_data", "load_tokenizer"]

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """The two sides of the split, ready to draw from. `validation` is None when nothing is held out."""

    tokenizer: Tokenizer | None  # None for random tokens
    vocab_size: int
    train: Loader
    validation: Loader | None
    summary: str  # of each source: documents, tokens, sequences


def load_data(run: Run, *, vocab_size: int | None = None) -> TokenData:
    """Read, tokenise, split and pack what `run.data` names.

    `vocab_size`: the model's; checked against the tokenizer, and the range of random tokens.
    Raises DataError (one line) for data that cannot be used.
    """
    data, batch = run.data, run.train.micro_batch
    if data.source == "random":
        size = vocab_size or 256
        both = [
            Loader(
                Passes(RandomSequences(size, data.sequence_length, run.seed, side), run.seed), batch
            )
            for side in (0, 1)
        ]
        held = both[1] if data.validation_fraction else None
        return TokenData(tokenizer=None, vocab_size=size, train=both[0], validation=held,
                         summary=f"random tokens below {size:,}")  # fmt: skip
    tokenizer = load_tokenizer(data.tokenizer)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer: {tokenizer.name!r} has {tokenizer.vocab_size:,} ids but "
            f"the model's vocab_size is {vocab_size:,}; set "
            f"model.overrides.vocab_size={tokenizer.vocab_size}"
        )
    parts = data_parts(data)
    sides = [_sides(part, corpus, tokenizer.separator, run.seed)
             for (part, _), corpus in zip(parts, _corpora(parts, tokenizer), strict=True)]  # fmt: skip
    weights = [weight for _, weight in parts]
    train = _drawn([s.train for s in sides], weights, run.seed, shuffle=data.shuffle)
    held = [s.validation for s in sides if s.validation is not None]
    validation = Loader(_drawn(held, weights, run.seed), batch) if held else None
    said = [f"{s.text}" for s in sides]
    if data.mix:
        said = [f"{w / sum(weights):.1%} {p.source}: {s}" for (p, w), s in
                zip(parts, said, strict=True)]  # fmt: skip
    return TokenData(
        tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, train=Loader(train, batch),
        validation=validation, summary=f"{'; '.join(said)} ({tokenizer.name})",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """One source, split and packed."""

    train: Sequences
    validation: Sequences | None
    text: str


def _sides(data: Data, corpus: Corpus, separator: int, seed: int) -> _Sides:
    kept, held = _split(corpus, data, seed)
    train = _sequences(kept, data, separator, "training")
    validation = None if held is None else _sequences(held, data, separator, "validation")
    total = len(corpus.tokens)
    text = f"{len(corpus.starts) - 1:,} documents, {total:,} tokens"
    if corpus.counts is not None:
        text += f", {np.count_nonzero(corpus.counts) / total:.0%} of them with loss"
    if corpus.split:
        text += f", {corpus.split:,} conversations cut into their answers (the template rewrites "
        text += "earlier turns)"
    if corpus.folder is not None:
        text += f", kept in {corpus.folder}"
    if corpus.why_not_kept:
        text += f", {corpus.why_not_kept}"
    text += f"; sequences of {data.sequence_length:,}: {len(train):,} to train on, "
    text += f"{0 if validation is None else len(validation):,} held out"
    return _Sides(train=train, validation=validation, text=text)


def _drawn(
    parts: list[Sequences], weights: list[float], seed: int, *, shuffle: bool = False
) -> Passes | Mixture:
    passes = [Passes(sequences, seed, shuffle=shuffle) for sequences in parts]
    return passes[0] if len(passes) == 1 else Mixture(passes, weights)


_in_memory: dict[tuple, Corpus] = {}  # of the last load, so that runs that follow share them


def _corpora(parts: list[tuple[Data, float]], tokenizer: Tokenizer) -> list[Corpus]:
    global _in_memory
    found: dict[tuple, Corpus] = {}
    corpora = []
    for data, _ in parts:
        key = (_reading(data), stamp_of(data), tokenizer.identity)
        if key not in found:
            found[key] = _in_memory.get(key) or read_corpus(data, tokenizer)
        corpora.append(found[key])
    _in_memory = found
    return corpora


def _reading(data: Data) -> str:
    """Only the keys that decide the token stream, so that runs that share them share it."""
    plain = Data()
    return repr(replace(data, sequence_length=plain.sequence_length, pack=plain.pack, mix={},
                        document_mask=plain.document_mask, shuffle=plain.shuffle,
                        validation_fraction=plain.validation_fraction))  # fmt: skip


def _split(corpus: Corpus, data: Data, seed: int) -> tuple[Stream, Stream | None]:
    """The stream to train on and the stream held out.

    Whole documents are held out, in seeded order, as long as they fit the share. Where that gives
    less than one sequence (one long text), the tail of the longest remaining document is added.
    """
    starts, share = corpus.starts, data.validation_fraction
    spans = np.stack([starts[:-1], starts[1:]], axis=1)
    if not share:
        return _stream(corpus, spans), None
    target = max(int(len(corpus.tokens) * share), data.sequence_length)
    order = shuffled(len(spans), seed, SPLIT)
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
    return _stream(corpus, kept[kept[:, 1] > kept[:, 0]]), _stream(corpus, out)


def _stream(corpus: Corpus, spans: np.ndarray) -> Stream:
    return Stream(corpus.tokens, spans, corpus.counts, corpus.checksum)


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
            f"{data.source}: {len(stream):,} tokens for {side}, less than one sequence of "
            f"{data.sequence_length:,}; {fix}"
        )
    return sequences


class Loader:
    """Draws batches without end, epoch after epoch. `position` counts the sequences drawn, by all
    ranks: it is the same on each of them, and goes on under any other number of them."""

    rank, world = 0, 1

    def __init__(self, order: Passes | Mixture, batch: int) -> None:
        self.order, self.batch = order, batch
        self.position = 0
        self._fingerprint = order.fingerprint()

    @property
    def sequences(self) -> Sequences:
        """The sequences of the one source. Raises ValueError for a mix, which has several."""
        if isinstance(self.order, Mixture):
            raise ValueError("a mix of sources: see order.parts")
        return self.order.sequences

    @property
    def epoch(self) -> float:
        """Passes over the data so far; of a mix, over the source that is used up first."""
        return self.position / len(self.order)

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
        rows = [self.order.at(position + i) for i in range(size or self.batch)]
        ids, documents, counts = (np.stack(column) for column in zip(*rows, strict=True))
        labels = np.where(counts, ids, IGNORE)
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
        total = min(batches * self.batch, len(self.order))
        for begin in range(0, total, self.batch):
            yield self.batch_at(begin, min(self.batch, total - begin))

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
