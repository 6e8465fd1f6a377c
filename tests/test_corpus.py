"""Several sources with weights, and tokens kept on disk: same bits, less memory, nothing stale."""

import json
import multiprocessing
import os
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from small_tokenizer import CHATML, build

from ottava.config import ConfigError, Data, Run, Train, load_run, run_from_dict, run_to_dict
from ottava.train.data import DataError, load_data
from ottava.train.sequences import Mixture, Passes, RandomSequences, apportioned

T = 16


def write(path, letter, count=40, size=30):
    path.write_text("".join(json.dumps({"text": letter * size}) + "\n" for _ in range(count)))
    return str(path)


def run_on(batch=4, seed=0, **keys):
    data = Data(**{"sequence_length": T, "validation_fraction": 0.0, "cache": "off"} | keys)
    return Run(data=data, train=Train(micro_batch=batch), seed=seed)


def letters(loader, batches):
    """How many sequences began with which letter's document."""
    rows = torch.cat([next(loader)["input_ids"] for _ in range(batches)])
    return Counter(chr(int(r[r != 256][0])) for r in rows)


# ---- mixes ----------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
    return {write(tmp_path / f"{c}.jsonl", c): w for c, w in (("a", 5), ("b", 3), ("c", 2.0))}


def test_every_prefix_of_a_mix_has_the_shares(three):
    loader = load_data(run_on(batch=10, mix=three)).train
    counts = Counter()
    for step in range(1, 40):
        counts += letters(loader, 1)
        for letter, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(counts[letter] - 10 * step * share) <= 1.6
    # over whole periods exact, but for the rounding of the shares to 1,024ths
    loader = load_data(run_on(batch=1024, mix=three)).train
    assert letters(loader, 2) == {"a": 1024, "b": 614, "c": 410}


def test_a_source_of_a_mix_repeats_only_when_it_is_used_up(three):
    loader = load_data(run_on(batch=1, mix=three)).train
    count = len(loader.order.parts[0])
    seen = []
    while len(seen) < 2 * count:
        batch = next(loader)
        if (batch["input_ids"] == ord("a")).any():
            seen.append(tuple(batch["document_ids"][0].tolist()))
    assert Counter(seen[:count]) == Counter(seen[count:]) and seen[:count] != seen[count:]


def test_a_mix_continues_from_a_position_and_refuses_another(three, tmp_path):
    one, two = (load_data(run_on(mix=three)).train for _ in range(2))
    for _ in range(23):
        next(one)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(20):
        a, b = next(one), next(two)
        assert all(torch.equal(a[k], b[k]) for k in ("input_ids", "labels", "document_ids"))
    other = {**three, next(iter(three)): 6}
    with pytest.raises(DataError, match="not the data that the checkpoint was made with"):
        load_data(run_on(mix=other)).train.load_state_dict(one.state_dict())


def test_held_out_sequences_of_a_mix_come_once(three):
    held = load_data(run_on(mix=three, validation_fraction=0.2)).validation
    total = len(held.order)
    rows = [tuple(map(tuple, b["document_ids"].tolist())) for b in held.first(10**6)]
    assert sum(map(len, rows)) == total
    parts = [p.sequences for p in held.order.parts]
    drawn = Counter()
    for number in range(total):
        k = int(held.order._whose[number % Mixture.PERIOD])
        drawn[k] += 1
    assert all(drawn[k] <= len(p) for k, p in enumerate(parts))
    assert any(drawn[k] == len(p) for k, p in enumerate(parts))  # and not fewer than could be


@pytest.mark.parametrize("sizes", [(3, 5), (7, 1), (1000, 2000), (1, 1)])
@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (1000, 1)])
def test_a_mix_ends_where_its_first_source_does(sizes, weights):
    class Few(RandomSequences):
        def __len__(self):
            return self.size

    parts = []
    for size in sizes:
        few = Few(10, T, 0, 0)
        few.size = size
        parts.append(Passes(few, 0))
    mixture, drawn, number = Mixture(parts, list(weights)), [0, 0], 0
    while True:  # the definition
        k = int(mixture._whose[number % 1024])
        if drawn[k] == sizes[k]:
            break
        drawn[k] += 1
        number += 1
    assert len(mixture) == number


def test_shares_are_rounded_to_the_nearest_and_add_up():
    assert apportioned([1, 1, 1], 1024).tolist() == [342, 341, 341]
    assert apportioned([1023, 1], 1024).tolist() == [1023, 1]
    assert sum(apportioned([0.1, 0.7, 0.15, 0.05], 1024)) == 1024


def test_text_and_chat_in_one_mix_from_a_run_file(tmp_path):
    build(tmp_path / "tokenizer", CHATML)
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the hat"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"chats": talk}) + "\n")
    text = write(tmp_path / "text.jsonl", "z")
    (tmp_path / "run.toml").write_text(
        f'[model]\nname = "dense-w1"\n[data]\ntokenizer = "{tmp_path}/tokenizer"\n'
        'sequence_length = 16\nvalidation_fraction = 0\ncache = "off"\n[data.mix]\n'
        f'"{text}" = 1\n"{tmp_path}/talk.jsonl" = {{weight = 3, kind = "chat", pack = false, '
        'messages_key = "chats"}\n'
    )
    run = load_run(tmp_path / "run.toml", ["data.shuffle=false", "train.micro_batch=8"])
    assert run_from_dict(json.loads(json.dumps(run_to_dict(run)))) == run
    data = load_data(run)
    assert f"25.0% {text}: 40 documents" in data.summary and "75.0% " in data.summary
    batch = next(data.train)
    talking = (batch["labels"] == -100).sum(1) > 3
    assert talking.tolist().count(True) == 6


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        ({"a": 0}, "data.mix.a: weight 0 must be a number above 0"),
        ({"a": "x"}, "data.mix.a: weight 'x' must be"),
        ({"a": {"kind": "chat"}}, "data.mix.a: weight None must be"),
        ({"a": {"weight": 1, "kid": 1}}, "'kid' cannot differ from source to source (did you mean"),
        ({"a": {"weight": 1, "tokenizer": "b"}}, "'tokenizer' cannot differ"),
        (
            {"a": {"weight": 1, "kind": "chats"}},
            "data.mix.a.kind: 'chats' is not one of text, chat",
        ),
        ({"a": {"weight": 1, "pack": 3}}, "pack: 3 must be true or false"),
        ({"a": 5000, "b": 1}, "data.mix.b: weight 1 of 5001 is less than one sequence in 1,024"),
        ({"random": 1}, "data.mix.random: random tokens cannot be mixed"),
        ({"a": float("nan")}, "data.mix.a: weight nan"),
    ],
)
def test_bad_mixes_are_refused_before_anything_is_read(mix, says):
    with pytest.raises(ConfigError) as error:
        run_from_dict({"model": {"name": "dense-w1"}, "data": {"mix": mix}}).check()
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_source_beside_a_mix_is_refused():
    given = {"model": {"name": "dense-w1"}, "data": {"source": "b.txt", "mix": {"a": 1}}}
    with pytest.raises(ConfigError, match=r"'b\.txt' beside data\.mix, which names the sources"):
        run_from_dict(given).check()


# ---- tokens on disk -------------------------------------------------------------------------


def drawn(run, batches=12):
    loader = load_data(run).train
    return [next(loader) for _ in range(batches)], loader.state_dict()


def same(one, two):
    (a, state_a), (b, state_b) = one, two
    assert state_a == state_b
    for x, y in zip(a, b, strict=True):
        assert all(torch.equal(x[k], y[k]) for k in ("input_ids", "labels", "document_ids"))


@pytest.mark.parametrize("pack", [True, False])
def test_kept_tokens_give_the_same_batches_and_positions(tmp_path, pack):
    source = write(tmp_path / "a.jsonl", "a")
    keys = {"source": source, "pack": pack, "validation_fraction": 0.2}
    memory = drawn(run_on(**keys))
    kept = run_on(**keys, cache=str(tmp_path / "kept"))
    same(drawn(kept), memory)
    corpus = load_data(kept).train.sequences.stream.source
    assert isinstance(corpus, np.memmap)
    same(drawn(kept), memory)


def test_kept_conversations_keep_what_has_loss(tmp_path):
    build(tmp_path / "tokenizer", CHATML)
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the hat"}]
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 9)
    keys = {"source": str(tmp_path / "talk.jsonl"), "kind": "chat",
            "tokenizer": str(tmp_path / "tokenizer")}  # fmt: skip
    same(drawn(run_on(**keys, cache=str(tmp_path / "kept"))), drawn(run_on(**keys)))


def test_nothing_is_tokenised_twice_and_nothing_stale_is_used(tmp_path, monkeypatch):
    from ottava.train import corpus, data

    build(tmp_path / "tokenizer", CHATML)
    source = write(tmp_path / "a.jsonl", "a")
    keys = {"source": source, "tokenizer": str(tmp_path / "tokenizer"), "cache": "auto"}
    reads = []
    original = corpus.read_documents
    monkeypatch.setattr(corpus, "read_documents", lambda d: reads.append(1) or original(d))

    def fresh(**more):
        data._in_memory = {}
        return drawn(run_on(**keys | more)), load_data(run_on(**keys | more)).summary

    first, summary = fresh()
    assert os.environ["OTTAVA_CACHE"] in summary and len(reads) == 1
    same(fresh()[0], first)
    assert len(reads) == 1
    fresh(max_bytes=100)
    assert len(reads) == 2
    write(tmp_path / "a.jsonl", "b", count=41)
    assert fresh()[0][1] != first[1] and len(reads) == 3
    build(tmp_path / "tokenizer", CHATML, vocab_size=264)  # the same path, other ids
    fresh()
    assert len(reads) == 4


@pytest.mark.parametrize("harm", ["cut", "gone", "meta", "version"])
def test_a_damaged_folder_is_written_again(tmp_path, harm):
    source = write(tmp_path / "a.jsonl", "a")
    run = run_on(source=source, cache=str(tmp_path / "kept"))
    whole = drawn(run)
    (folder,) = [p for p in (tmp_path / "kept").iterdir() if p.is_dir()]
    tokens, meta = folder / "tokens.bin", folder / "corpus.json"
    if harm == "cut":
        os.truncate(tokens, tokens.stat().st_size - 2)
    elif harm == "gone":
        tokens.unlink()
    elif harm == "meta":
        meta.write_text("{")
    else:
        meta.write_text(meta.read_text().replace('"version": 1', '"version": 0'))
    from ottava.train import data

    data._in_memory = {}
    same(drawn(run), whole)
    assert not list((tmp_path / "kept").glob(".partial-*"))


def test_a_failed_reading_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 5}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        load_data(run_on(source=str(path), cache=str(tmp_path / "kept")))
    assert [p.suffix for p in (tmp_path / "kept").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    build(tmp_path / "tokenizer")
    source = write(tmp_path / "a.jsonl", "a")
    (tmp_path / "file").touch()
    keys = {"source": source, "tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(DataError, match=r"data\.cache: .*file.*: Not a directory|File exists"):
        load_data(run_on(**keys, cache=str(tmp_path / "file")))
    monkeypatch.setenv("OTTAVA_CACHE", str(tmp_path / "file"))
    assert "not kept: " in load_data(run_on(**keys, cache="auto")).summary


def test_large_byte_data_is_kept_by_itself(tmp_path, monkeypatch):
    from ottava.train import corpus

    source = write(tmp_path / "a.jsonl", "a")
    assert ", kept in" not in load_data(run_on(source=source, cache="auto")).summary
    monkeypatch.setattr(corpus, "LARGE", 1000)
    monkeypatch.setattr("ottava.train.data._in_memory", {})
    assert ", kept in" in load_data(run_on(source=source, cache="auto")).summary


def _read_in_parallel(given):
    path, folder = given
    batches, state = drawn(run_on(source=path, cache=folder), 2)
    return [b["input_ids"].tolist() for b in batches], state


def test_two_processes_write_one_corpus_between_them(tmp_path):
    source, folder = write(tmp_path / "a.jsonl", "a", count=2000), str(tmp_path / "kept")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        one, two = pool.map(_read_in_parallel, [(source, folder)] * 2)
    assert one == two
    assert len([p for p in (tmp_path / "kept").iterdir() if p.is_dir()]) == 1


def test_neither_text_nor_tokens_are_whole_in_memory(tmp_path, monkeypatch):
    from ottava.train import corpus

    monkeypatch.setattr(corpus, "PIECE", 1 << 18)
    source = write(tmp_path / "a.jsonl", "a", count=2000, size=8000)  # 16 MB, 32 MB of tokens
    tracemalloc.start()
    try:
        loader = load_data(run_on(source=source, cache=str(tmp_path / "kept"))).train
        for _ in range(50):
            next(loader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # the order of an epoch takes some 32 bytes a sequence; nothing else grows with the text
    assert peak < 10e6 + 40 * len(loader.order)
    assert (tmp_path / "a.jsonl").stat().st_size > 16e6
