"""Conversations to token ids, with a mark on every token that counts in the loss: the answers.

The tokenizer's chat template writes the conversation; what belongs to an answer is found in one of
two ways. A template that says it itself ({% generation %}) is believed. Otherwise the conversation
is written once up to each answer, as a model would be asked for it, and what is written after that
is the answer, its end-of-turn mark included. Where a template rewrites earlier turns once later
ones exist (drops their reasoning, say), one text cannot hold what was asked each time: such a
conversation becomes one document per answer, each as the model meets it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from .sources import DataError, Messages
from .tokenizer import Tokenizer

ANSWERS = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class _Text:
    """A conversation as the template writes it, and where answers begin and end in it (characters)."""

    text: str
    answers: list[tuple[int, int]]
    where: str


@dataclass(frozen=True)
class Encoded:
    """One document. ids: int32 [N]; counts: bool [N], True on the tokens that have loss."""

    ids: np.ndarray
    counts: np.ndarray


def check_template(tokenizer: Tokenizer, kind: str) -> None:
    """Raises DataError where a tokenizer cannot write conversations."""
    hf = tokenizer.hf
    if hf is None or not getattr(hf, "chat_template", None):
        raise DataError(
            f"data.tokenizer: {tokenizer.name!r} has no chat template, which data.kind={kind} needs; "
            "use the tokenizer of a chat model, put a chat_template.jinja beside it, or write the "
            "text yourself and use data.kind=text"
        )
    if not getattr(hf, "is_fast", False) and not _GENERATION.search(_template(hf)):
        raise DataError(
            f"data.tokenizer: {tokenizer.name!r} is a slow tokenizer, which does not say where its "
            f"tokens stand in the text, as data.kind={kind} needs; use its fast version"
        )


def encode_conversations(
    tokenizer: Tokenizer, conversations: list[tuple[Messages, str]]
) -> list[list[Encoded]]:
    """The documents of each conversation (messages, where they stand): one, or one per answer.

    Raises DataError for a conversation that the template refuses or that holds no answer.
    """
    hf = tokenizer.hf
    for messages, where in conversations:
        if not any(m["role"] == ANSWERS for m in messages):
            roles = ", ".join(dict.fromkeys(str(m["role"]) for m in messages))
            raise DataError(f"{where}: no message has the role 'assistant', only {roles}")
    if _GENERATION.search(_template(hf)):
        return [[_marked(hf, messages, where)] for messages, where in conversations]
    texts = [_texts(hf, messages, where) for messages, where in conversations]
    flat = iter(_tokens(hf, [text for own in texts for text in own]))
    return [[next(flat) for _ in own] for own in texts]


def _template(hf: Any) -> str:
    template = hf.chat_template
    if isinstance(template, dict):  # several by name; "default" is the one that is used
        template = template.get("default", "")
    return str(template)


def _write(hf: Any, messages: Messages, where: str, *, asked: bool = False) -> str:
    try:
        return hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked)
    except Exception as error:  # Jinja's own kinds, and whatever a template raises
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{where}: the chat template refuses this conversation: {why}") from None


def _marked(hf: Any, messages: Messages, where: str) -> Encoded:
    _write(hf, messages, where)
    out = hf.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    counts = np.asarray(out["assistant_masks"], bool)
    if not counts.any():
        raise DataError(
            f"{where}: the chat template marks answers with generation tags but marked none here"
        )
    return Encoded(np.asarray(out["input_ids"], np.int32), counts)


def _texts(hf: Any, messages: Messages, where: str) -> list[_Text]:
    whole = _write(hf, messages, where)
    apart: list[_Text] = []
    for i, message in enumerate(messages):
        if message["role"] != ANSWERS:
            continue
        so_far = whole if i + 1 == len(messages) else _write(hf, messages[: i + 1], where)
        begin = _answer_begins(hf, messages[:i], so_far, where)
        apart.append(_Text(so_far, [(begin, len(so_far))], where))
    if all(whole.startswith(t.text) for t in apart):
        return [_Text(whole, [t.answers[0] for t in apart], where)]
    return apart


def _answer_begins(hf: Any, before: Messages, text: str, where: str) -> int:
    """Where in `text` the answer to the messages `before` begins.

    After all of the prompt that a model would be given, or, where the template writes more into
    that prompt than into the conversation (an opened <think>), after what both share.
    """
    if not before:
        raise DataError(f"{where}: the first message is an answer; nothing was asked before it")
    prompt = _write(hf, before, where, asked=True)
    pairs = zip(prompt, text, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(text)))
    if shared < len(prompt):
        asked = _write(hf, before, where)
        if not prompt.startswith(asked) or shared < len(asked):
            raise DataError(
                f"{where}: the chat template writes the messages before an answer differently once "
                "the answer is there, so it cannot be told where the answer begins; use a template "
                "with {% generation %} tags"
            )
    return shared


def _tokens(hf: Any, texts: list[_Text]) -> list[Encoded]:
    if not texts:
        return []
    out = hf([t.text for t in texts], add_special_tokens=False, return_offsets_mapping=True,
             return_attention_mask=False, verbose=False)  # fmt: skip
    encoded = []
    for text, ids, offsets in zip(texts, out["input_ids"], out["offset_mapping"], strict=True):
        spans = np.asarray(offsets, np.int64).reshape(-1, 2)
        counts = np.zeros(len(spans), bool)
        for begin, end in text.answers:  # a token that starts before the answer is not the answer's
            counts |= (spans[:, 0] >= begin) & (spans[:, 1] <= end) & (spans[:, 1] > spans[:, 0])
        encoded.append(Encoded(np.asarray(ids, np.int32), counts))
    return encoded
