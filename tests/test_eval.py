"""`ottava eval`: against the trainer's own evaluation, by hand, and what it refuses."""

import json
import math
import sys
import types

import pytest
import torch
from small_tokenizer import build
from transformers import LlamaConfig, LlamaForCausalLM

from ottava.cli import DONE, REFUSED, main
from ottava.config import load_run
from ottava.train import evaluate as ev
from ottava.train.tokenizer import load_tokenizer
from ottava.train.trainer import Trainer

TEXT = "the cat and the hat, é! and the cat. " * 12


@pytest.fixture
def trained(tmp_path):
    """A run in FP32 with a running average, and its trainer."""
    path = tmp_path / "toy.toml"
    path.write_text(f"""
out = "{tmp_path}/out"
[model]
name = "dense-100m"
[model.overrides]
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
num_hidden_layers = 1
intermediate_size = 64
vocab_size = 272
[data]
source = "{tmp_path}/text.txt"
sequence_length = 16
validation_fraction = 0.4
[train]
preset = "fp32"
steps = 5
micro_batch = 2
eval_batches = 1000
[optimizer]
lr = 1e-2
[ema]
decay = 0.8
""")
    (tmp_path / "text.txt").write_text(TEXT)
    trainer = Trainer(load_run(path))
    trainer.run(quiet=True)
    return trainer, tmp_path / "out"


def answer(capsys, *arguments):
    code = main(["eval", *map(str, arguments), "--json"])
    done = capsys.readouterr()
    assert code == DONE, done.err
    return json.loads(done.out)


def refused(capsys, *arguments) -> str:
    assert main(["eval", *map(str, arguments)]) == REFUSED
    done = capsys.readouterr()
    assert done.out == "" and done.err.count("\n") == 1
    return done.err


def test_live_and_averaged_weights_score_as_in_the_run(trained, capsys):
    trainer, out = trained
    live, ema = answer(capsys, out)["rows"]
    assert (live["weights"], ema["weights"]) == ("live", "ema")
    assert live["loss"] == pytest.approx(trainer.evaluate(), rel=1e-5)
    assert ema["loss"] == pytest.approx(trainer.evaluate(averaged=True), rel=1e-5)
    assert abs(live["loss"] - ema["loss"]) > 1e-3
    assert live["perplexity"] == pytest.approx(math.exp(live["loss"]))
    (only,) = answer(capsys, out, "--weights", "ema", "--batches", 1)["rows"]
    assert only["weights"] == "ema" and only["tokens"] == 4 * 15


def test_an_exported_folder_scores_as_its_checkpoint(trained, capsys, tmp_path):
    out = trained[1]
    assert main(["export", str(out), str(tmp_path / "hf"), "--dtype", "fp32"]) == DONE
    capsys.readouterr()
    (tmp_path / "b.txt").write_text(TEXT)
    arguments = ("--text", tmp_path / "b.txt", "--length", 24, "--stride", 8)
    checkpoint = answer(capsys, out, *arguments)["rows"][0]
    (folder,) = answer(capsys, tmp_path / "hf", "--tokenizer", "bytes", *arguments)["rows"]
    assert folder == checkpoint
    assert main(["eval", str(out), *map(str, arguments)]) == DONE
    shown = capsys.readouterr().out
    assert f"loss {checkpoint['loss']:.4f}" in shown and "bits a byte" in shown


@pytest.mark.parametrize("stride", [0, 1, 5, 16])
@pytest.mark.parametrize("size", [3, 16, 17, 50])
def test_every_token_is_scored_once(tmp_path, size, stride):
    (tmp_path / "a.txt").write_text("x" * (size - 1))
    tokenizer = load_tokenizer("bytes")
    text = ev.text_of(str(tmp_path / "a.txt"), tokenizer, length=16, stride=stride, batch=3)
    step, position, seen = stride or 16, 0, []
    for batch in text.batches:
        for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            scored = (labels != -100).nonzero().flatten() + position
            assert (labels[labels != -100] == row[labels != -100]).all()
            seen += scored.tolist()
            position += step
    lost = 0 if stride not in (0, 16) else len(range(16, size, 16))  # the first of later windows
    assert len(seen) == len(set(seen)) == size - 1 - lost
    assert text.tokens == size and text.bytes == size - 1


def test_the_loss_is_what_it_says(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=320,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf")
    hf = build(tmp_path / "hf")
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps({"body": t}) + "\n" for t in (TEXT[:90], TEXT[:31], "é")))  # fmt: skip
    source = ev.find_source(tmp_path / "hf")
    text = ev.text_of(
        str(tmp_path / "rows.jsonl"), ev.tokenizer_of(source), text_key="body", length=9, stride=4
    )
    loaded = ev.load_weights(source, "live", torch.float32, torch.device("cpu"))
    score = ev.score(loaded, text)
    # by hand: each token from those of its document that stand in the first window that holds it
    stream, document = [], []
    for d, t in enumerate((TEXT[:90], TEXT[:31], "é")):
        ids = [*hf(t, add_special_tokens=False)["input_ids"], hf.eos_token_id]
        stream += ids
        document += [d] * len(ids)
    total, count, scored = 0.0, 0, 0
    for begin in range(0, len(stream), 4):
        end = min(begin + 9, len(stream))
        for t in range(max(scored, begin + 1), end):
            before = [i for i in range(begin, t) if document[i] == document[t]]
            if before:
                with torch.no_grad():
                    logits = model(torch.tensor([[stream[i] for i in before]])).logits[0, -1]
                total -= float(logits.log_softmax(-1)[stream[t]])
                count += 1
        scored = end
        if end == len(stream):
            break
    assert score.tokens == count
    assert score.loss == pytest.approx(total / count, rel=1e-5)
    size = sum(len(t.encode()) for t in (TEXT[:90], TEXT[:31], "é"))
    bits = score.loss / math.log(2) * len(stream) / size
    assert score.bits_per_byte == pytest.approx(bits)


def test_bfloat16_rounds_the_average_and_not_its_sum(trained):
    trainer, out = trained
    model = ev.load_weights(ev.find_source(out), "ema", torch.bfloat16, torch.device("cpu"))
    for name, p in model.named_parameters():
        assert p.dtype is torch.bfloat16
        assert torch.equal(p, trainer.ema.shadow[name].bfloat16())


def test_requests_that_cannot_be_answered(trained, capsys, tmp_path):
    out = trained[1]
    text = tmp_path / "text.txt"
    assert "--weights: 'mean' is not one of all, live, ema" in refused(
        capsys, out, "--weights", "mean"
    )
    assert "no such file or folder" in refused(capsys, out, "--text", tmp_path / "none.txt")
    assert "--stride: 9 must be from 1 to --length=8" in refused(
        capsys, out, "--text", text, "--length", 8, "--stride", 9
    )
    assert "holds no checkpoint" in refused(capsys, tmp_path)
    assert "--dtype: 'fp8' is not one of" in refused(capsys, out, "--dtype", "fp8")
    assert "--device: 'tpu' is not one of" in refused(capsys, out, "--device", "tpu")
    main(["export", str(out), str(tmp_path / "hf")])
    capsys.readouterr()
    assert "is no run; give a text" in refused(capsys, tmp_path / "hf")
    assert "holds none; name one, or bytes" in refused(capsys, tmp_path / "hf", "--text", text)
    assert "holds no running average" in refused(
        capsys, tmp_path / "hf", "--text", text, "--weights", "ema"
    )
    (tmp_path / "one.txt").write_bytes(b"")
    assert "empty file" in refused(capsys, out, "--text", tmp_path / "one.txt")
    big = build(tmp_path / "big")
    assert len(big) > 272
    assert "ids but the model knows 272" in refused(
        capsys, out, "--text", text, "--tokenizer", tmp_path / "big"
    )


# ---- lm-evaluation-harness ------------------------------------------------------------------


@pytest.fixture
def chatless(tmp_path):
    """A Hugging Face folder with its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=320,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    build(tmp_path / "hf")
    return tmp_path / "hf"


def test_without_the_harness_one_line_says_how_to_get_it(chatless, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    message = refused(capsys, chatless, "--tasks", "arc_easy")
    assert (
        "--tasks: lm-evaluation-harness is not installed; run: pip install 'ottava[eval]'"
        in message
    )


def test_the_harness_is_called_as_its_interface_is(chatless, capsys, monkeypatch):
    calls = {}

    class TaskManager:
        def __init__(self, include_path=None):
            calls["folder"] = include_path

        def match_tasks(self, names):
            return [n for n in names if n != "arc_esy"]

    def simple_evaluate(model, tasks, limit, task_manager, log_samples, bootstrap_iters):
        calls.update(model=model, tasks=tasks, limit=limit)
        return {"results": {"arc_easy": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.1}}}

    class HFLM:
        def __init__(self, pretrained, tokenizer, batch_size):
            self.pretrained, self.tokenizer, self.batch_size = pretrained, tokenizer, batch_size

    for name, members in {
        "lm_eval": {"simple_evaluate": simple_evaluate}, "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM}, "lm_eval.tasks": {"TaskManager": TaskManager},
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        module.__dict__.update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    (row,) = answer(capsys, chatless, "--tasks", "arc_easy,", "--limit", 7, "--batch", 3)["rows"]
    assert row == {"weights": "live", "tasks": {"arc_easy": {"acc": 0.25}}}
    assert calls["tasks"] == ["arc_easy"] and calls["limit"] == 7 and calls["folder"] is None
    assert calls["model"].batch_size == 3 and not calls["model"].pretrained.training
    message = refused(capsys, chatless, "--tasks", "arc_esy")
    assert "--tasks: lm-evaluation-harness knows no task 'arc_esy'" in message
    message = refused(capsys, chatless, "--tasks", "arc_easy", "--tokenizer", "bytes")
    assert "needs a Hugging Face tokenizer, not 'bytes'" in message


def test_the_real_harness_runs_a_task_of_ones_own(chatless, capsys, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    rows = [{"question": "the cat and the", "choices": [" hat", " cat"], "answer": 0}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "tasks" / "hats.yaml").write_text(f"""
task: hats
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{tmp_path}/rows.jsonl"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    (row,) = answer(capsys, chatless, "--tasks", "hats", "--tasks-from", tmp_path / "tasks")["rows"]
    assert row["tasks"]["hats"]["acc"] in (0.0, 1.0)
