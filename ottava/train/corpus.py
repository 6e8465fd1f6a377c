"""All tokens of one source, end to end: read once, kept in memory or in files that are mapped.

On disk a corpus is a folder named after everything that decides its tokens: the files' times and
sizes, the keys of [data] that choose what is read, and the tokenizer. It is written aside and
renamed when whole, by one process at a time; a folder whose sizes are wrong is written again. Text
is read in pieces and tokens are read where a sequence lies, so neither is ever whole in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Data
from .conversations import check_template, encode_conversations
from .sequences import checksum
from .sources import DataError, read_conversations, read_documents, source_files, stamp_of
from .tokenizer import Tokenizer

VERSION = 1
PIECE = 1 << 24  # bytes of text that are tokenised at a time
LARGE = 1 << 28  # bytes of text from which "auto" keeps even byte tokens on disk


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens of all documents end to end; document d is tokens[starts[d]:starts[d + 1]].

    counts: which tokens have loss, None for all. checksum: of tokens, counts and starts. split:
    conversations that became several documents. folder: where it is kept, None for memory.
    """

    tokens: np.ndarray  # uint16 or int32
    starts: np.ndarray  # int64, one more than documents
    counts: np.ndarray | None  # bool
    checksum: int
    split: int = 0
    folder: Path | None = None
    why_not_kept: str = ""


def read_corpus(data: Data, tokenizer: Tokenizer) -> Corpus:
    """The corpus of `data.source` (not of a mix). Raises DataError for data that cannot be used."""
    if data.kind != "text":
        check_template(tokenizer, data.kind)
    folder = _folder_for(data, tokenizer)
    if folder is None:
        return _in_memory(data, tokenizer)
    try:
        return _kept(folder, data, tokenizer)
    except OSError as error:
        if data.cache != "auto":
            raise DataError(f"data.cache: {folder}: {error.strerror or error}") from None
        corpus = _in_memory(data, tokenizer)
        why = f"not kept: {folder.parent}: {error.strerror or error}"
        return Corpus(**{**vars(corpus), "why_not_kept": why})


def cache_folder(data: Data) -> Path:
    """Where `data.cache` keeps tokens; for auto $OTTAVA_CACHE, or ottava in the user's cache."""
    if data.cache != "auto":
        return Path(data.cache)
    home = os.environ.get("OTTAVA_CACHE")
    if home:
        return Path(home) / "tokens"
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "ottava" / "tokens"


def _folder_for(data: Data, tokenizer: Tokenizer) -> Path | None:
    if data.cache == "off":
        return None
    if data.cache == "auto" and tokenizer.name == "bytes":
        files = source_files(data)
        size = sum(p.stat().st_size for p in files)
        if size < LARGE or 0 < data.max_bytes < LARGE:
            return None
    stamp = stamp_of(data)
    read = (data.kind, data.text_key, data.messages_key, data.prompt_keys, data.answer_key)
    key = repr((VERSION, stamp, read, data.max_bytes, tokenizer.identity))
    return cache_folder(data) / hashlib.sha256(key.encode()).hexdigest()[:24]


# ---- tokens in order ----


def _documents(data: Data, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, Any, bool]]:
    """(token ids with the separator, which of them count or None for all, whether it continues the
    conversation of the document before) of each document."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    separator = np.array([tokenizer.separator], dtype)
    if data.kind == "text":
        for batch in _groups(((d, len(d)) for d in read_documents(data)), PIECE):
            for ids in tokenizer.encode(batch):
                if len(ids):
                    yield np.concatenate([ids.astype(dtype, copy=False), separator]), None, False
        return
    sized = (
        (item, sum(len(str(m.get("content", ""))) for m in item[0]))
        for item in read_conversations(data)
    )
    for batch in _groups(sized, PIECE):
        for own in encode_conversations(tokenizer, batch):
            for number, document in enumerate(own):
                ids, counts = document.ids.astype(dtype), document.counts
                if not len(ids):
                    continue
                if ids[-1] != tokenizer.separator:  # most templates end with it
                    ids, counts = np.append(ids, separator), np.append(counts, False)
                yield ids, counts, number > 0


def _groups(items: Iterable[tuple[Any, int]], size: int) -> Iterator[list[Any]]:
    """Lists of items (each with its size) of about `size` together."""
    group: list[Any] = []
    total = 0
    for item, weight in items:
        group.append(item)
        total += weight
        if total >= size:
            yield group
            group, total = [], 0
    if group:
        yield group


class _Gathered:
    """What is known of a corpus besides its tokens, as documents go by. `starts`: whole at the end."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.lengths = array("q")
        self.sum = self.split = self.answers = self.tokens = 0
        self._was_split = False
        self._said = time.monotonic()

    def note(self, ids: np.ndarray, counts: np.ndarray | None, continues: bool) -> None:
        self.lengths.append(len(ids))
        self.tokens += len(ids)
        self.sum = checksum(ids.tobytes(), b"" if counts is None else counts.tobytes(), of=self.sum)
        self.answers += 0 if counts is None else int(counts.sum())
        self.split += continues and not self._was_split
        self._was_split = continues
        if time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            print(f"ottava: {self.data.source}: {self.tokens:,} tokens so far", file=sys.stderr)

    def close(self) -> np.ndarray:
        """The starts int64. Raises DataError where nothing was there, or nothing has loss."""
        if not self.lengths:
            raise DataError(f"{self.data.source}: holds no text")
        if self.data.kind != "text" and not self.answers:
            raise DataError(f"{self.data.source}: no token of any answer; every answer is empty")
        starts = np.concatenate([[0], np.cumsum(np.frombuffer(self.lengths, np.int64))])
        self.sum = checksum(starts.tobytes(), of=self.sum)
        return starts


def _in_memory(data: Data, tokenizer: Tokenizer) -> Corpus:
    gathered = _Gathered(data)
    pieces, marks = [], []
    for ids, counts, continues in _documents(data, tokenizer):
        gathered.note(ids, counts, continues)
        pieces.append(ids)
        if counts is not None:
            marks.append(counts)
    starts = gathered.close()
    return Corpus(
        tokens=np.concatenate(pieces),
        starts=starts,
        counts=np.concatenate(marks) if marks else None,
        checksum=gathered.sum,
        split=gathered.split,
    )


# ---- on disk ----


def _kept(folder: Path, data: Data, tokenizer: Tokenizer) -> Corpus:
    found = _open(folder)
    if found is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # falls with the process
        found = _open(folder)  # another rank may have written it meanwhile
        if found is None:
            _write(folder, data, tokenizer)
            found = _open(folder)
    if found is None:
        raise OSError(f"{folder}: does not hold what was just written into it")
    return found


def _write(folder: Path, data: Data, tokenizer: Tokenizer) -> None:
    aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        gathered, marked = _Gathered(data), False
        with open(aside / "tokens.bin", "wb") as tokens, open(aside / "counts.bin", "wb") as marks:
            for ids, counts, continues in _documents(data, tokenizer):
                gathered.note(ids, counts, continues)
                tokens.write(ids.tobytes())
                if counts is not None:
                    marked = True
                    marks.write(counts.tobytes())
        np.save(aside / "starts.npy", gathered.close())
        meta = {
            "version": VERSION, "source": data.source, "tokenizer": tokenizer.name,
            "dtype": "uint16" if tokenizer.vocab_size <= 2**16 else "int32",
            "tokens": gathered.tokens, "documents": len(gathered.lengths), "marked": marked,
            "checksum": gathered.sum, "split": gathered.split,
        }  # fmt: skip
        (aside / "corpus.json").write_text(json.dumps(meta, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(aside)


def _open(folder: Path) -> Corpus | None:
    """The corpus in `folder`, or None where there is none, or not a whole one."""
    try:
        meta = json.loads((folder / "corpus.json").read_text())
        starts = np.load(folder / "starts.npy")
        number, dtype = int(meta["tokens"]), np.dtype(meta["dtype"])
        sizes = {"tokens.bin": number * dtype.itemsize, "counts.bin": number * meta["marked"]}
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
        if not whole or meta["version"] != VERSION or int(starts[-1]) != number:
            return None
        return Corpus(
            tokens=np.memmap(folder / "tokens.bin", dtype, "r"),
            starts=starts,
            counts=np.memmap(folder / "counts.bin", bool, "r") if meta["marked"] else None,
            checksum=int(meta["checksum"]),
            split=int(meta["split"]),
            folder=folder,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
