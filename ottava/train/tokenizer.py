"""Text to token ids: bytes, or a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .sources import DataError


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to token ids. `separator` ends every document and fills short sequences.

    `identity` changes with anything that changes a token id or the chat template. `hf`: the Hugging
    Face tokenizer behind it, None for bytes.
    """

    name: str
    vocab_size: int  # ids are below this
    separator: int
    encode: Callable[[list[bytes]], list[np.ndarray]]  # UTF-8 documents -> 1-D integer arrays
    identity: str
    hf: Any = None


def load_tokenizer(name: str) -> Tokenizer:
    """ "bytes" (ids 0..255, separator 256), or a Hugging Face tokenizer folder or name.

    Raises DataError where it cannot be loaded or has nothing to separate documents with.
    """
    if name == "bytes":
        return Tokenizer(
            name="bytes",
            vocab_size=257,
            separator=256,
            encode=lambda texts: [np.frombuffer(t, np.uint8) for t in texts],
            identity="bytes",
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

    return Tokenizer(
        name=name,
        vocab_size=max(len(hf), separator + 1),
        separator=separator,
        encode=encode,
        identity=_identity(hf, separator),
        hf=hf,
    )


def _identity(hf: Any, separator: int) -> str:
    backend = getattr(hf, "backend_tokenizer", None)
    whole = backend.to_str() if backend is not None else repr(sorted(hf.get_vocab().items()))
    parts = (whole, str(getattr(hf, "chat_template", None)), str(separator))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()
