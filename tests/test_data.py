"""Documents, tokens, splits, order and position of the data pipeline, and what it refuses."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from ottava.config import Data, Run, Train
from ottava.train.data import DataError, load_data, load_tokenizer, positions_in_document
from ottava.train.sources import read_documents

T = 16


def run_on(source, *, batch=2, seed=0, **keys) -> Run:
    data = Data(
        **({"source": str(source), "sequence_length": T, "validation_fraction": 0.0} | keys)
    )
    return Run(data=data, train=Train(micro_batch=batch), seed=seed)


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: t}) + "\n" for t in texts))
    return path


@pytest.fixture
def letters(tmp_path):
    """20 documents of 30 bytes, each of one letter."""
    return write_jsonl(tmp_path / "letters.jsonl", [chr(97 + i) * 30 for i in range(20)])


def refusal(source, **keys) -> str:
    with pytest.raises(DataError) as error:
        load_data(run_on(source, **keys))
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- packing and labels ---------------------------------------------------------------------


def test_packing_keeps_every_token_in_order_and_ends_documents_with_a_separator(letters):
    loader = load_data(run_on(letters, shuffle=False)).train
    rows = torch.cat([b["input_ids"] for b in loader.first(10**6)])
    stream = [t for i in range(20) for t in [97 + i] * 30 + [256]]
    assert rows.shape[1] == T
    assert rows.flatten().tolist() == stream[: rows.numel()]
    assert len(stream) - rows.numel() < T


def test_batches_have_the_promised_types(letters):
    batch = next(load_data(run_on(letters)).train)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, T)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["document_ids"].dtype == torch.int32
    assert type(batch["num_valid"]) is int


def test_no_label_crosses_a_document_boundary(letters):
    for batch in load_data(run_on(letters)).train.first(10**6):
        ids, labels, documents = batch["input_ids"], batch["labels"], batch["document_ids"]
        valid = labels != -100
        assert torch.equal(labels[valid], ids[valid])
        assert not valid[:, 0].any()
        # the model predicts labels[t] from t - 1: both must belong to one document
        assert torch.equal(valid[:, 1:], documents[:, 1:] == documents[:, :-1])
        assert batch["num_valid"] == int(valid.sum())
        # a separator is the last token of its document, so it is predicted, and predicts nothing
        after = (ids == 256).nonzero()
        after = after[after[:, 1] + 1 < T]
        assert not valid[after[:, 0], after[:, 1] + 1].any()


def test_separate_documents_are_cut_or_padded(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["abc", "d" * 40])
    short, long = (
        load_data(run_on(path, pack=False, shuffle=False)).train.first(1).__next__()["input_ids"]
    )
    assert short.tolist() == [97, 98, 99] + [256] * (T - 3)
    assert long.tolist() == [100] * T
    batch = load_data(run_on(path, pack=False, shuffle=False)).train.batch_at(0)
    assert batch["labels"][0].tolist() == [-100, 98, 99, 256] + [-100] * (T - 4)
    assert batch["document_ids"][0].tolist() == [0] * 4 + [-1] * (T - 4)
    assert batch["num_valid"] == 3 + T - 1


def test_positions_start_again_at_each_document():
    documents = torch.tensor([[4, 4, 5, 5, 5, 6], [1, 1, 1, 1, -1, -1]], dtype=torch.int32)
    expected = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]]
    assert positions_in_document(documents).tolist() == expected


# ---- order, position, split -----------------------------------------------------------------


def test_each_epoch_visits_every_sequence_once_in_another_order(letters):
    loader = load_data(run_on(letters, batch=1)).train
    count = len(loader.sequences)
    rows = [next(loader)["document_ids"].flatten().tolist() for _ in range(2 * count)]
    ids = [tuple(r) for r in rows]
    assert Counter(ids[:count]) == Counter(ids[count:])
    assert ids[:count] != ids[count:]
    assert ids[:count] != sorted(ids[:count])
    assert loader.epoch == 2.0


def test_order_depends_on_the_seed_and_nothing_else(letters):
    def first(seed):
        return next(load_data(run_on(letters, batch=8, seed=seed)).train)["input_ids"]

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


def test_the_shuffled_order_is_pinned():
    """A changed hash would silently change every run that resumes."""
    from ottava.train.sequences import shuffled

    assert shuffled(8, 0, 0).tolist() == [6, 0, 7, 3, 5, 2, 4, 1]
    assert shuffled(8, 2**63 - 1, 5).tolist() == [0, 7, 2, 6, 1, 4, 3, 5]


@pytest.mark.parametrize("source", ["letters", "random"])
def test_a_saved_position_continues_with_the_same_batches(letters, source):
    path = letters if source == "letters" else "random"
    one, two = (load_data(run_on(path, batch=3)).train for _ in range(2))
    for _ in range(17):
        next(one)
    state = json.loads(json.dumps(one.state_dict()))
    two.load_state_dict(state)
    for _ in range(20):
        assert torch.equal(next(one)["input_ids"], next(two)["input_ids"])


@pytest.mark.parametrize("change", [{"seed": 1}, {"sequence_length": 8}, {"pack": False}])
def test_a_position_in_other_data_is_refused(letters, change):
    state = load_data(run_on(letters)).train.state_dict()
    with pytest.raises(DataError, match="not the data that the checkpoint was made with"):
        load_data(run_on(letters, **change)).train.load_state_dict(state)


def test_a_changed_file_is_read_again_and_refused_on_resume(letters):
    state = load_data(run_on(letters)).train.state_dict()
    write_jsonl(letters, [chr(98 + i) * 31 for i in range(20)])
    changed = load_data(run_on(letters)).train
    assert int(changed.sequences.stream.tokens.min()) == 98
    with pytest.raises(DataError):
        changed.load_state_dict(state)


def test_validation_holds_out_whole_documents_by_seed(letters):
    def held(seed):
        data = load_data(run_on(letters, validation_fraction=0.2, seed=seed))
        sides = [{int(t) for t in s.sequences.stream.tokens} - {256}
                 for s in (data.train, data.validation)]  # fmt: skip
        assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 20
        assert len(sides[1]) == 4
        return sides[1]

    assert held(0) == held(0)
    assert len({frozenset(held(seed)) for seed in range(5)}) > 1


def test_one_long_text_holds_out_its_tail(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(1, 101)) * 10)
    data = load_data(run_on(path, validation_fraction=0.1))
    train, held = (s.sequences.stream.tokens for s in (data.train, data.validation))
    assert np.concatenate([train, held]).tolist() == [*(bytes(range(1, 101)) * 10), 256]
    assert len(held) == 100


def test_evaluation_batches_leave_no_trace_and_repeat_nothing(letters):
    data = load_data(run_on(letters, validation_fraction=0.2))
    before = data.validation.state_dict()
    sizes = [len(b["input_ids"]) for b in data.validation.first(10**6)]
    assert sum(sizes) == len(data.validation.sequences)
    assert data.validation.state_dict() == before
    assert len(list(data.validation.first(2))) == 2


def test_random_tokens_cover_the_vocabulary_and_hold_out_others():
    data = load_data(run_on("random", batch=64, validation_fraction=0.1), vocab_size=50)
    ids = next(data.train)["input_ids"]
    assert set(ids.flatten().tolist()) == set(range(50))
    assert not torch.equal(ids, data.validation.batch_at(0)["input_ids"])
    assert not torch.equal(ids[0], ids[1])


# ---- sources --------------------------------------------------------------------------------


def test_the_standard_library_is_enough_text_everywhere():
    documents = list(read_documents(Data(source="stdlib", max_bytes=3_000_000)))
    assert sum(map(len, documents)) == pytest.approx(3_000_000, abs=4)
    assert all(d.decode() and b"\0" not in d for d in documents)
    assert documents == list(read_documents(Data(source="stdlib", max_bytes=3_000_000)))


def test_max_bytes_cuts_between_characters(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("é" * 10)
    assert list(read_documents(Data(source=str(path), max_bytes=7))) == ["ééé".encode()]


def test_a_folder_is_read_by_path_and_hidden_files_are_not(tmp_path):
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("\ufefffirst", encoding="utf-8")
    (tmp_path / "c").mkdir()
    write_jsonl(tmp_path / "c" / "d.jsonl", ["third", "", "fourth"])
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.txt").write_bytes(b"\0")
    (tmp_path / "picture.png").write_bytes(b"\0")
    documents = list(read_documents(Data(source=str(tmp_path))))
    assert documents == [b"first", b"second", b"third", b"fourth"]


def test_parquet_and_saved_datasets_give_their_rows(tmp_path):
    pa, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    from pyarrow import parquet

    rows = {"content": ["one", "two", "three"], "n": [1, 2, 3]}
    parquet.write_table(pa.table(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "plain"))
    both = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows))
    both.save_to_disk(str(tmp_path / "split"))
    for name in ("a.parquet", "plain", "split"):
        source = str(tmp_path / name)
        documents = list(read_documents(Data(source=source, text_key="content")))
        assert documents == [b"one", b"two", b"three"]
        assert "did you mean data.text_key=content?" in refusal(source, text_key="contents")
        assert "set data.text_key to one of content, n" in refusal(source, text_key="zzz")
        assert "holds int, not text" in refusal(source, text_key="n")


def test_a_data_set_by_name_is_loaded_or_refused_in_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, config, *, split):
        asked.append((name, config, split))
        if name == "some/gone":
            raise ConnectionError("no\nnetwork")
        return datasets.Dataset.from_dict({"text": ["x" * 40]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(read_documents(Data(source="some/set:en"))) == [b"x" * 40]
    assert asked == [("some/set", "en", "train")]
    message = refusal("some/gone")
    assert message.startswith("some/gone: no such file or folder here") and "no network" in message


# ---- tokenizers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A byte-level tokenizer with an end-of-text token, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat"] * 50, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    return folder, fast


def test_a_hugging_face_tokenizer_is_used(tmp_path, tokenizer_folder):
    folder, fast = tokenizer_folder
    text = "the cat and the hat, é! " * 20
    (tmp_path / "a.txt").write_text(text)
    data = load_data(run_on(tmp_path / "a.txt", tokenizer=str(folder), shuffle=False))
    stream = data.train.sequences.stream.tokens.tolist()
    assert fast.decode(stream[:-1]) == text
    assert stream[-1] == data.tokenizer.separator == fast.eos_token_id
    assert len(stream) < len(text) and data.vocab_size == len(fast)


def test_a_tokenizer_larger_than_the_model_is_refused(letters):
    with pytest.raises(DataError, match=r"model\.overrides\.vocab_size=257"):
        load_data(run_on(letters), vocab_size=256)
    load_data(run_on(letters), vocab_size=257)


def test_a_missing_tokenizer_is_refused(letters, tmp_path, monkeypatch):
    message = refusal(letters, tokenizer=str(tmp_path / "nothing here"))
    assert message.startswith("data.tokenizer:") and "cannot be loaded" in message


def test_large_vocabularies_need_four_bytes_a_token(letters, monkeypatch):
    from ottava.train import data as module

    assert load_data(run_on(letters)).train.sequences.stream.tokens.dtype == np.uint16
    wide = replace(load_tokenizer("bytes"), vocab_size=2**16 + 1, identity="wide")
    monkeypatch.setattr(module, "load_tokenizer", lambda name: wide)
    assert load_data(run_on(letters)).train.sequences.stream.tokens.dtype == np.int32


# ---- what is refused ------------------------------------------------------------------------


def test_a_missing_path_is_refused_with_the_nearest(letters):
    assert f"did you mean {letters}?" in refusal(letters.with_name("leters.jsonl"))
    assert "no such file or folder" in refusal(letters.parent / "zzz" / "a.txt")
    assert "did you mean 'stdlib'?" in refusal("stdlb")


BAD = [
    ("a.txt", b"", "a.txt: empty file"),
    ("a.txt", b"ab\0cd", "a.txt: binary, not text: NUL at byte 2"),
    ("a.txt", b"ab\xffcd", "a.txt: not UTF-8: byte 0xff at byte 2"),
    ("a.txt", "text".encode("utf-16"), "a.txt: binary"),
    ("a.csv", b"a,b", "a.csv: .csv is not read; convert it"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', "a.jsonl:3: broken JSON at column"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "a.jsonl:2: not UTF-8: byte 0xff at byte 10"),
    ("a.jsonl", b'{"text": "a"}\n[1]', "a.jsonl:2: not a JSON object but list"),
    ("a.jsonl", b'{"text": 5}', "a.jsonl:1: 'text' holds int, not text"),
    ("a.jsonl", b'{"text": null}', "a.jsonl:1: 'text' holds NoneType, not text"),
    ("a.jsonl", b'{"texts": "a"}', "a.jsonl:1: no 'text'; did you mean data.text_key=texts?"),
    ("a.jsonl", b"{}", "a.jsonl:1: no 'text'; set data.text_key to one of (nothing)"),
    ("a.jsonl", b'{"text": "a\\u0000b"}', "a.jsonl:1: binary"),
    ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:1: 'text' is not Unicode text"),
    ("a.jsonl", b'{"text": ""}', "holds no text"),
    ("a.jsonl", b"[" * 100_000, "a.jsonl:1: broken JSON"),
    ("a.parquet", b"PAR1 no", "a.parquet: not a readable Parquet file"),
    ("a.txt", b"short", "6 tokens for training, less than one sequence of 16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "says"), BAD)
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, says):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    assert says in refusal(path)


def test_a_bad_file_in_a_folder_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("fine " * 100)
    (tmp_path / "b.txt").write_bytes(b"x\xff")
    assert f"{tmp_path / 'b.txt'}: not UTF-8" in refusal(tmp_path)


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\0")
    assert "no .txt, .md, .py, .jsonl, .parquet file" in refusal(tmp_path)


def test_too_little_text_to_hold_out_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * (T + 3))
    message = refusal(path, validation_fraction=0.1)
    assert "less than one sequence" in message and "lower data.sequence_length" in message
