"""Where documents come from: each source yields UTF-8 documents, or says in one line what is wrong.

A document is `bytes` that are valid UTF-8, hold no NUL and are not empty. Order is fixed: files by
path, rows as stored.
"""

from __future__ import annotations

import difflib
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import Data

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?")


class DataError(ValueError):
    """The data cannot be used. Carries exactly one line: where, what, what to do."""


def read_documents(data: Data) -> Iterator[bytes]:
    """The documents of `data.source`, cut after `data.max_bytes` bytes (0: all).

    Raises DataError for anything that is missing, empty, binary, not UTF-8 or malformed.
    """
    left = data.max_bytes or float("inf")
    for document in _documents(data):
        if len(document) > left:
            document = document[: int(left)].decode("utf-8", "ignore").encode()
        if document:
            yield document
        left -= len(document)
        if left <= 0 or (data.max_bytes and left < 4):  # a character may need 4 bytes
            return


def source_files(data: Data) -> list[Path]:
    """The local files behind `data.source`, in order; empty for a data set by name."""
    if data.source == "stdlib":
        return _stdlib_files()
    path = Path(data.source)
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
    return [path] if path.exists() else []


def _documents(data: Data) -> Iterator[bytes]:
    path = Path(data.source)
    if data.source == "stdlib":
        return _stdlib()
    if path.is_dir():
        return _folder(path, data)
    if path.exists():
        return _file(path, data)
    if near := difflib.get_close_matches(data.source, ("stdlib", "random"), 1, 0.7):
        raise DataError(f"data.source: no such source {data.source!r}; did you mean {near[0]!r}?")
    if _HUB_NAME.fullmatch(data.source) and path.suffix not in SUFFIXES:
        return _hub(data)
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


def _folder(path: Path, data: Data) -> Iterator[bytes]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from _saved_dataset(path, data)
        return
    files = [
        p
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.suffix in SUFFIXES and not _hidden(p, path)
    ]
    if not files:
        raise DataError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
    for file in files:
        if file.stat().st_size:  # an empty file among others is no mistake
            yield from _file(file, data)


def _file(path: Path, data: Data) -> Iterator[bytes]:
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: empty file")
        if path.suffix == ".jsonl":
            yield from _jsonl(path, data.text_key)
        elif path.suffix == ".parquet":
            yield from _parquet(path, data.text_key)
        elif path.suffix in (".json", ".csv", ".gz", ".zip", ".zst", ".arrow"):
            raise DataError(f"{path}: {path.suffix} is not read; convert it to .jsonl or .parquet")
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


def _text_of(row: object, text_key: str, where: str) -> bytes:
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object but {type(row).__name__}")
    if text_key not in row:
        raise DataError(f"{where}: {_missing(text_key, list(row))}")
    text = row[text_key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} holds {type(text).__name__}, not text")
    try:
        return _checked(text.encode("utf-8"), where)
    except UnicodeEncodeError as error:  # a lone surrogate escape
        raise DataError(f"{where}: {text_key!r} is not Unicode text: {error.reason}") from None


def _missing(text_key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(text_key, names, 1)
    if near:
        return f"no {text_key!r}; did you mean data.text_key={near[0]}?"
    return f"no {text_key!r}; set data.text_key to one of {', '.join(names[:20]) or '(nothing)'}"


def _jsonl(path: Path, text_key: str) -> Iterator[bytes]:
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
            yield _text_of(row, text_key, where)


def _needs(module: str, what: str) -> DataError:
    return DataError(f"{what}: needs {module}; run: pip install 'ottava[data]'")


def _parquet(path: Path, text_key: str) -> Iterator[bytes]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise _needs("pyarrow", str(path)) from None
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if text_key not in names:
            raise DataError(f"{path}: {_missing(text_key, names)}")
        row = 0
        for batch in file.iter_batches(columns=[text_key]):
            for text in batch.column(0).to_pylist():
                yield _text_of({text_key: text}, text_key, f"{path}: row {row}")
                row += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _rows(dataset: Any, data: Data) -> Iterator[bytes]:
    if hasattr(dataset, "keys"):  # a DatasetDict
        splits = list(dataset.keys())
        if "train" not in splits:
            raise DataError(f"{data.source}: no 'train' split, only {', '.join(splits)}")
        dataset = dataset["train"]
    if data.text_key not in dataset.column_names:
        raise DataError(f"{data.source}: {_missing(data.text_key, list(dataset.column_names))}")
    row = 0
    for batch in dataset.select_columns([data.text_key]).iter(batch_size=1000):
        for text in batch[data.text_key]:
            yield _text_of({data.text_key: text}, data.text_key, f"{data.source}: row {row}")
            row += 1


def _saved_dataset(path: Path, data: Data) -> Iterator[bytes]:
    try:
        import datasets
    except ImportError:
        raise _needs("datasets", str(path)) from None
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds; all mean the same here
        raise DataError(f"{path}: not a readable data set: {_line(error)}") from None
    yield from _rows(dataset, data)


def _hub(data: Data) -> Iterator[bytes]:
    name, _, config = data.source.partition(":")
    try:
        import datasets
    except ImportError:
        raise _needs("datasets", data.source) from None
    try:
        dataset = datasets.load_dataset(name, config or None, split="train")
    except Exception as error:  # no network, no such name, a script: all end the request
        raise DataError(
            f"{data.source}: no such file or folder here, and no Hugging Face data set could be "
            f"loaded by that name: {_line(error)}"
        ) from None
    yield from _rows(dataset, data)
