"""How good weights are outside their run: perplexity of a checkpoint or of a Hugging Face folder.

The model is computed in plain PyTorch, nothing in 8 bits: what is measured is what `ottava export`
would write. Live weights are the masters; averaged ones are the checkpoint's running average. Every
token is scored once, given what of its document stands before it in its window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from ..config import Data, Run, run_from_dict
from ..layers.head import chunk_head, why_whole
from ..models.fp8_checkpoint import load_fp8
from ..models.load import holds_fp8, load_config, load_model, skeleton
from .checkpoint import Checkpoint
from .corpus import read_corpus
from .data import IGNORE, load_data
from .export import DTYPES, find_checkpoint, model_of
from .forward import Batch, inputs_of
from .sequences import Stream
from .sources import DataError, read_documents
from .tokenizer import Tokenizer, load_tokenizer

WEIGHTS = ("all", "live", "ema")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is evaluated. `run` and `checkpoint`: None for a plain Hugging Face folder."""

    folder: Path  # config.json and the weights
    checkpoint: Checkpoint | None = None
    run: Run | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The weights that are there: "live", and "ema" where a running average was kept."""
        averaged = self.checkpoint is not None and "ema" in self.checkpoint.skeleton
        return ("live", "ema") if averaged else ("live",)


@dataclass(frozen=True, kw_only=True)
class Score:
    """loss: nats a token over `tokens` scored tokens. bits_per_byte: the loss of all tokens of a text
    over its bytes, which does not depend on the tokenizer; None for conversations."""

    weights: str
    loss: float
    tokens: int
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


def find_source(path: str | Path) -> Source:
    """The run's newest checkpoint, a checkpoint, or a Hugging Face folder.

    Raises CheckpointError where there is none of them, ConfigError for a run that this version does
    not understand.
    """
    path = Path(path)
    if (path / "config.json").exists() and not (path / "manifest.json").exists():
        return Source(folder=path)
    checkpoint, passed_over = find_checkpoint(path)
    if not (checkpoint.path / "config.json").exists():
        raise checkpoint.refused("has no config.json: its model is not a Hugging Face model")
    return Source(
        folder=checkpoint.path,
        checkpoint=checkpoint,
        run=run_from_dict(checkpoint.section("run")),
        passed_over=tuple(passed_over),
    )


def chosen_weights(source: Source, wanted: str) -> tuple[str, ...]:
    """The kinds of weights to evaluate. Raises ValueError for an average that is not there."""
    if wanted not in WEIGHTS:
        raise ValueError(f"--weights: {wanted!r} is not one of {', '.join(WEIGHTS)}")
    if wanted == "all":
        return source.kinds
    if wanted not in source.kinds:
        raise ValueError(
            f"--weights ema: {source.folder} holds no running average; train with ema.decay=0.999"
        )
    return (wanted,)


def load_weights(source: Source, kind: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The plain model in evaluation mode, with its live or averaged weights, in `dtype`."""
    disable_progress_bar()  # a line a tensor is no answer to a question
    folder = str(source.folder)
    # an average is FP32; rounding comes after it
    first = dtype if kind == "live" else torch.float32
    if holds_fp8(folder):
        model = skeleton(folder, dtype=first)
        load_fp8(folder, model)
    elif source.checkpoint is not None and not (source.folder / "model.safetensors").exists():
        model = model_of(source.checkpoint, first)  # every rank wrote its share
    else:
        model = load_model(folder, dtype=first)
    if kind == "ema":
        shadow = source.checkpoint.section("ema")["shadow"]
        own = dict(model.named_parameters())
        odd = sorted(shadow.keys() - own.keys())
        if odd:
            raise source.checkpoint.refused(f"averages {odd[0]}, which its model does not have")
        with torch.no_grad():
            for name, value in shadow.items():
                own[name].copy_(value)
        kept = {n for n, p in load_model(folder, dtype=dtype, device="meta").named_parameters()
                if p.dtype is torch.float32}  # fmt: skip
        for name, p in own.items():
            if name not in kept:
                p.data = p.data.to(dtype)
    if hasattr(model.config, "output_router_logits"):  # no auxiliary loss in a perplexity
        model.config.output_router_logits = False
    return model.to(device).eval().requires_grad_(False)


def tokenizer_of(source: Source, name: str = "") -> Tokenizer:
    """The tokenizer asked for, the run's, or the folder's own. Raises ValueError or DataError."""
    if not name and source.run is not None and source.run.data.source != "random":
        name = source.run.data.tokenizer
    if not name and any((source.folder / f).exists() for f in _TOKENIZER_FILES):
        name = str(source.folder)
    if not name:
        raise ValueError(f"--tokenizer: {source.folder} holds none; name one, or bytes")
    tokenizer = load_tokenizer(name)
    known = load_config(str(source.folder)).vocab_size
    if tokenizer.vocab_size > known:
        raise DataError(
            f"--tokenizer: {name!r} has {tokenizer.vocab_size:,} ids but the model knows {known:,}; "
            "give the tokenizer that it was trained with"
        )
    return tokenizer


# ---- what is scored ----


@dataclass(frozen=True, kw_only=True)
class Text:
    """Batches to score, all of one text; its bytes and tokens where it is one (0 where not)."""

    batches: list[Batch]
    bytes: int = 0
    tokens: int = 0
    document_mask: bool = True


def text_of(
    path: str, tokenizer: Tokenizer, *, text_key: str = "text", length: int = 512,
    stride: int = 0, batch: int = 4, limit: int = 0,
) -> Text:  # fmt: skip
    """The windows of a text, a folder or a data set, as `data.source` names them.

    length: tokens in a window; stride: from one window to the next (0: length, no overlap); a token
    is scored in the first window that holds it. limit: batches, 0 for all.
    """
    if not 0 <= stride <= length:
        raise ValueError(f"--stride: {stride} must be from 1 to --length={length}; 0: no overlap")
    data = Data(source=path, text_key=text_key, tokenizer=tokenizer.name, cache="off")
    corpus = read_corpus(data, tokenizer)
    spans = np.stack([corpus.starts[:-1], corpus.starts[1:]], axis=1)
    windows = list(_windows(Stream(corpus.tokens, spans), length, stride or length))
    batches = list(_batched(windows, batch))
    whole = not limit or limit >= len(batches)
    return Text(
        batches=batches[: limit or None],
        bytes=sum(map(len, read_documents(data))) if whole else 0,
        tokens=len(corpus.tokens),
    )


def held_out(source: Source, *, batch: int = 4, limit: int = 0) -> Text:
    """What the run held out. Raises ValueError where that is nothing."""
    if source.run is None:
        raise ValueError(f"--text: {source.folder} is no run; give a text to evaluate on")
    run = replace(source.run, train=replace(source.run.train, micro_batch=batch))
    held = load_data(run, vocab_size=load_config(str(source.folder)).vocab_size).validation
    if held is None:
        raise ValueError("--text: the run held nothing out; give a text to evaluate on")
    if run.data.source == "random" and not limit:
        raise ValueError("--batches: the run's random tokens never end; give a number")
    batches = list(held.first(limit or 10**9))
    return Text(batches=batches, document_mask=run.data.document_mask)


def _windows(stream: Stream, length: int, stride: int) -> Iterator[tuple[np.ndarray, ...]]:
    """(ids, labels, documents) of each window; the last may be shorter."""
    total, scored = len(stream), 0
    for begin in range(0, total, stride):
        end = min(begin + length, total)
        ids, documents, _ = stream.read(begin, end)
        labels = ids.copy()
        labels[: max(scored - begin, 1)] = IGNORE  # scored before; the first has nothing before it
        labels[1:][documents[1:] != documents[:-1]] = IGNORE
        yield ids, labels, documents
        scored = end
        if end == total:
            return


def _batched(windows: list[tuple[np.ndarray, ...]], size: int) -> Iterator[Batch]:
    for begin in range(0, len(windows), size):
        group = windows[begin : begin + size]
        last = len(group[-1][0])
        for rows in (
            [w for w in group if len(w[0]) != last],
            [w for w in group if len(w[0]) == last],
        ):
            if rows:
                ids, labels, documents = (
                    torch.from_numpy(np.stack(c)) for c in zip(*rows, strict=True)
                )
                yield {"input_ids": ids, "labels": labels, "document_ids": documents,
                       "num_valid": int((labels != IGNORE).sum())}  # fmt: skip


# ---- scoring ----


@torch.no_grad()
def score(model: nn.Module, text: Text, kind: str = "live") -> Score:
    """The mean loss of `model` over a text. Raises ValueError where nothing of it can be scored."""
    if why_whole(model) is None:
        chunk_head(model)
    device = next(model.parameters()).device
    valid = sum(b["num_valid"] for b in text.batches)
    if not valid:
        raise ValueError("--text: too short: no token has one of its document before it")
    total = 0.0
    for batch in text.batches:
        inputs = inputs_of(model, batch, device, text.document_mask)
        total += float(model(**inputs, num_items_in_batch=1).loss)
    loss = total / valid
    bits = loss * text.tokens / text.bytes / math.log(2) if text.bytes else None
    return Score(weights=kind, loss=loss, tokens=valid, bits_per_byte=bits)


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in: as named, else FP32 on a CPU and BF16 on a GPU."""
    if name and name not in DTYPES:
        raise ValueError(f"--dtype: {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name or ("bf16" if device.type == "cuda" else "fp32")]


def plain(score: Score) -> dict[str, Any]:
    """A score for JSON."""
    return {
        "weights": score.weights, "loss": score.loss, "perplexity": score.perplexity,
        "tokens": score.tokens, "bits_per_byte": score.bits_per_byte,
    }  # fmt: skip
