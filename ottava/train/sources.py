"""Where rows come from: each source yields documents or conversations, or says in one line what is
wrong.

A document is `bytes` that are valid UTF-8, hold no NUL and are not empty. A conversation is a list
of messages, {"role", "content"} and what else a row holds. Order is fixed: files by path, rows as
stored; a line or a batch of rows at a time.
"""

from __future__ import annotations

import difflib
import json
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Data

Messages = list[dict[str, Any]]
TEXT_SUFFIXES = (".txt", ".md", ".py")
ROW_SUFFIXES = (".jsonl", ".parquet")
SUFFIXES = (*TEXT_SUFFIXES, *ROW_SUFFIXES)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?")


class DataError(ValueError):
    """The data cannot be used. Carries exactly one line: where, what, what to do."""


@dataclass(frozen=True)
class _Columns:
    """What is read of a row: columns, each with the option that names it, and what they make."""

    options: Mapping[str, str]
    make: Callable[[dict[str, Any], str], Any]  # the row's columns, where it stands


def read_documents(data: Data) -> Iterator[bytes]:
    """The documents of `data.source`, cut after `data.max_bytes` bytes (0: all).

    Raises DataError for anything that is missing, empty, binary, not UTF-8 or malformed.
    """
    left = data.max_bytes or float("inf")
    columns = _Columns(
        {data.text_key: "data.text_key"},
        lambda row, where: _text_of(row[data.text_key], data.text_key, where),
    )
    for document in _rows_of(data, columns):
        if len(document) > left:
            document = document[: int(left)].decode("utf-8", "ignore").encode()
        if document:
            yield document
        left -= len(document)
        if left <= 0 or (data.max_bytes and left < 4):  # a character may need 4 bytes
            return


def read_conversations(data: Data) -> Iterator[tuple[Messages, str]]:
    """(the messages, where they stand) of every row of `data.source`, which is of kind chat or
    instruction; ends before the row that would exceed `data.max_bytes` bytes of content (0: all).

    Raises DataError as `read_documents` does, and for messages that are none.
    """
    if data.kind == "chat":
        key = data.messages_key
        columns = _Columns(
            {key: "data.messages_key"},
            lambda row, where: (messages_of(row[key], key, where), where),
        )
    else:
        options = dict.fromkeys(data.prompt_keys, "data.prompt_keys")
        columns = _Columns(
            {**options, data.answer_key: "data.answer_key"},
            lambda row, where: (_instruction(row, data, where), where),
        )
    read = 0
    for messages, where in _rows_of(data, columns):
        read += sum(len(m["content"].encode()) for m in messages if m.get("content"))
        if data.max_bytes and read > data.max_bytes:
            return
        yield messages, where


def messages_of(value: Any, key: str, where: str) -> Messages:
    """The messages of a row: {"role", "content"} each, or ShareGPT's {"from", "value"}.

    Keys that hold nothing are dropped, as Arrow fills them in. Raises DataError.
    """
    if not isinstance(value, list) or not value:
        kind = "nothing" if value in (None, []) else type(value).__name__
        raise DataError(f"{where}: {key!r} holds {kind}, not a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        at = f"{where}: message {number} of {key!r}"
        if not isinstance(message, dict):
            raise DataError(f"{at} is {type(message).__name__}, not an object")
        message = {k: v for k, v in message.items() if v is not None}
        if "role" not in message and "from" in message:
            role = str(message.pop("from"))
            message = {"role": _SHAREGPT.get(role, role), "content": message.pop("value", None),
                       **message}  # fmt: skip
        if not isinstance(message.get("role"), str):
            raise DataError(f"{at} has no role; it has {', '.join(message) or 'nothing'}")
        content = message.get("content")
        if content is None and "tool_calls" in message:
            message["content"] = ""
        elif not isinstance(content, str):
            raise DataError(f"{at}: content is {type(content).__name__}, not text")
        messages.append(message)
    return messages


_SHAREGPT = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


def _instruction(row: dict[str, Any], data: Data, where: str) -> Messages:
    asked = [_text_of(row[k] or "", k, where).decode() for k in data.prompt_keys]
    answer = _text_of(row[data.answer_key], data.answer_key, where).decode()
    question = "\n\n".join(text for text in asked if text.strip())
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def source_files(data: Data) -> list[Path]:
    """The local files behind `data.source`, in order; empty for a data set by name."""
    if data.source == "stdlib":
        return _stdlib_files()
    path = Path(data.source)
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
    return [path] if path.exists() else []


def _rows_of(data: Data, columns: _Columns) -> Iterator[Any]:
    path = Path(data.source)
    if data.source == "stdlib":
        if data.kind != "text":
            raise DataError(f"stdlib: holds text, no {data.kind} data; set data.kind=text")
        return _stdlib()
    if path.is_dir():
        return _folder(path, data, columns)
    if path.exists():
        return _file(path, data, columns)
    if near := difflib.get_close_matches(data.source, ("stdlib", "random"), 1, 0.7):
        raise DataError(f"data.source: no such source {data.source!r}; did you mean {near[0]!r}?")
    if _HUB_NAME.fullmatch(data.source) and path.suffix not in SUFFIXES:
        return _hub(data, columns)
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    hint = f"did you mean {path.parent / near[0]}?" if near else "check the path"
    raise DataError(f"{path}: no such file or folder; {hint}")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & {*p.parts})
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def _stdlib() -> Iterator[bytes]:
    """The standard library's sources. The few that test other encodings on purpose are left out."""
    for path in _stdlib_files():
        text = path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text and b"\0" not in text:
            yield text


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _folder(path: Path, data: Data, columns: _Columns) -> Iterator[Any]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from _saved_dataset(path, data, columns)
        return
    suffixes = SUFFIXES if data.kind == "text" else ROW_SUFFIXES
    files = [
        p
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.suffix in suffixes and not _hidden(p, path)
    ]
    if not files:
        raise DataError(f"{path}: no {', '.join(suffixes)} file in this folder")
    for file in files:
        if file.stat().st_size:  # an empty file among others is no mistake
            yield from _file(file, data, columns)


def _file(path: Path, data: Data, columns: _Columns) -> Iterator[Any]:
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: empty file")
        if path.suffix == ".jsonl":
            yield from _jsonl(path, columns)
        elif path.suffix == ".parquet":
            yield from _parquet(path, columns)
        elif path.suffix in (".json", ".csv", ".gz", ".zip", ".zst", ".arrow"):
            raise DataError(f"{path}: {path.suffix} is not read; convert it to .jsonl or .parquet")
        elif data.kind != "text":
            raise DataError(
                f"{path}: {path.suffix or 'a file without a suffix'} is read as text; {data.kind} "
                f"data stands in {' or '.join(ROW_SUFFIXES)}"
            )
        else:
            yield _checked(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _checked(text: bytes, where: str) -> bytes:
    text = text.removeprefix(b"\xef\xbb\xbf")
    if (at := text.find(b"\0")) >= 0:
        raise DataError(f"{where}: binary, not text: NUL at byte {at}")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{text[error.start]:02x} at byte {error.start}; convert it "
            "(iconv -t utf-8)"
        ) from None
    return text


def _text_of(text: Any, key: str, where: str) -> bytes:
    if not isinstance(text, str):
        raise DataError(f"{where}: {key!r} holds {type(text).__name__}, not text")
    try:
        return _checked(text.encode("utf-8"), where)
    except UnicodeEncodeError as error:  # a lone surrogate escape
        raise DataError(f"{where}: {key!r} is not Unicode text: {error.reason}") from None


def _check_names(columns: _Columns, names: list[str], where: str) -> None:
    """DataError for the first column that is not there, with the nearest."""
    for wanted, option in columns.options.items():
        if wanted in names:
            continue
        near = difflib.get_close_matches(wanted, names, 1)
        if near:
            raise DataError(f"{where}: no {wanted!r}; did you mean {option}={near[0]}?")
        choice = ", ".join(names[:20]) or "(nothing)"
        raise DataError(f"{where}: no {wanted!r}; set {option} to one of {choice}")


def _jsonl(path: Path, columns: _Columns) -> Iterator[Any]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            text = _checked(line, where)
            try:
                row = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                why = getattr(error, "msg", "nested too deeply")
                column = getattr(error, "colno", 1)
                raise DataError(f"{where}: broken JSON at column {column}: {why}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: not a JSON object but {type(row).__name__}")
            _check_names(columns, list(row), where)
            yield columns.make(row, where)


def _needs(module: str, what: str) -> DataError:
    return DataError(f"{what}: needs {module}; run: pip install 'ottava[data]'")


def _parquet(path: Path, columns: _Columns) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise _needs("pyarrow", str(path)) from None
    try:
        file = parquet.ParquetFile(path)
        _check_names(columns, file.schema_arrow.names, str(path))
        number = 0
        for batch in file.iter_batches(columns=list(columns.options), batch_size=1000):
            for row in batch.to_pylist():
                yield columns.make(row, f"{path}: row {number}")
                number += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _dataset(dataset: Any, source: str, columns: _Columns) -> Iterator[Any]:
    if hasattr(dataset, "keys"):  # a DatasetDict
        splits = list(dataset.keys())
        if "train" not in splits:
            raise DataError(f"{source}: no 'train' split, only {', '.join(splits)}")
        dataset = dataset["train"]
    _check_names(columns, list(dataset.column_names), source)
    number = 0
    for batch in dataset.select_columns(list(columns.options)).iter(batch_size=1000):
        for values in zip(*(batch[name] for name in columns.options), strict=True):
            row = dict(zip(columns.options, values, strict=True))
            yield columns.make(row, f"{source}: row {number}")
            number += 1


def _saved_dataset(path: Path, data: Data, columns: _Columns) -> Iterator[Any]:
    try:
        import datasets
    except ImportError:
        raise _needs("datasets", str(path)) from None
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds; all mean the same here
        raise DataError(f"{path}: not a readable data set: {_line(error)}") from None
    yield from _dataset(dataset, data.source, columns)


def _hub(data: Data, columns: _Columns) -> Iterator[Any]:
    yield from _dataset(_by_name(data.source), data.source, columns)


def _by_name(source: str) -> Any:
    name, _, config = source.partition(":")
    try:
        import datasets
    except ImportError:
        raise _needs("datasets", source) from None
    try:
        return datasets.load_dataset(name, config or None, split="train")
    except Exception as error:  # no network, no such name, a script: all end the request
        raise DataError(
            f"{source}: no such file or folder here, and no Hugging Face data set could be "
            f"loaded by that name: {_line(error)}"
        ) from None


def stamp_of(data: Data) -> tuple:
    """What changes when the data behind `data.source` changes: the files' times and sizes; of a
    data set by name, its own fingerprint."""
    files = source_files(data)
    if not files and _HUB_NAME.fullmatch(data.source):
        return (str(getattr(_by_name(data.source), "_fingerprint", "")),)
    return tuple((str(p.resolve()), p.stat().st_mtime_ns, p.stat().st_size) for p in files)
