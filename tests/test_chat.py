"""Chat and instruction data: what is written, what has loss, and what is refused."""

import json

import pytest
import torch
from small_tokenizer import CHATML, FORGETFUL, STRICT, TAGGED, build

from ottava.config import Data, Run, Train
from ottava.train.data import DataError, load_data

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "the hat"},
    {"role": "user", "content": "and the cat"},
    {"role": "assistant", "content": "é, no"},
]


@pytest.fixture
def made(tmp_path):
    """make(rows, template) -> a run on those rows, and the tokenizer."""

    def make(rows, template=CHATML, **keys):
        tokenizer = build(tmp_path / "tokenizer", template)
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        data = Data(
            **{"source": str(path), "kind": "chat", "tokenizer": str(tmp_path / "tokenizer"),
               "sequence_length": 256, "pack": False, "validation_fraction": 0.0,
               "shuffle": False, "cache": "off"} | keys
        )  # fmt: skip
        return Run(data=data, train=Train(micro_batch=1)), tokenizer

    return make


def documents(run, tokenizer):
    """(whole text, the text that has loss) of each sequence."""
    data = load_data(run)
    out = []
    for batch in data.train.first(10**6):
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        assert torch.equal(labels[labels != -100], ids[labels != -100])
        assert batch["num_valid"] == int((labels != -100).sum())
        real = ids[batch["document_ids"][0] >= 0]
        out.append((tokenizer.decode(real), tokenizer.decode(ids[labels != -100])))
    return out, data.summary


def test_loss_is_on_the_answers_and_their_ends_only(made):
    run, tokenizer = made([{"messages": TALK}])
    ((whole, learned),), summary = documents(run, tokenizer)
    assert whole == tokenizer.apply_chat_template(TALK, tokenize=False) + "<end>"
    assert learned == "the hat<|im_end|>\né, no<|im_end|>\n"
    assert "% of them with loss" in summary and "cut into" not in summary


def test_a_template_that_marks_its_answers_is_believed(made):
    run, tokenizer = made([{"messages": TALK}], TAGGED)
    ((whole, learned),), _ = documents(run, tokenizer)
    assert whole.startswith("<|im_start|>system\nbe brief")
    assert learned == "the hat<|im_end|>é, no<|im_end|>"  # without the line breaks after them


def test_a_template_that_forgets_reasoning_gives_one_document_per_answer(made):
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>a</think>x"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>b</think>y"},
    ]
    run, tokenizer = made([{"messages": talk}, {"messages": talk[:2]}], FORGETFUL)
    out, summary = documents(run, tokenizer)
    assert [learned for _, learned in out] == [
        "a</think>x<|im_end|>\n", "b</think>y<|im_end|>\n", "a</think>x<|im_end|>\n"
    ]  # fmt: skip
    assert "<think>a" in out[0][0] and "<think>a" not in out[1][0]
    assert "1 conversations cut into their answers" in summary


def test_what_a_template_opens_for_the_model_but_does_not_write_is_no_obstacle(made):
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "plain"}]
    run, tokenizer = made([{"messages": talk}], FORGETFUL)
    ((_, learned),), _ = documents(run, tokenizer)
    assert learned == "plain<|im_end|>\n"


def test_a_template_that_ends_turns_with_the_separator_gets_no_second(made):
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the hat"}]
    run, tokenizer = made([{"messages": talk}], STRICT)
    ((whole, learned),), _ = documents(run, tokenizer)
    assert whole == "[INST] the cat [/INST] the hat<end>" and learned == " the hat<end>"


def test_packed_conversations_keep_their_marks(made):
    rows = [{"messages": TALK}] * 7
    alone, _ = made(rows)
    per_document = load_data(alone).train.batch_at(0)["num_valid"]
    packed, _ = made(rows, pack=True, sequence_length=16)
    data = load_data(packed)
    total = sum(b["num_valid"] for b in data.train.first(10**6))
    # cut at 16 tokens, at most the first of each sequence is lost
    assert per_document * 7 - len(data.train.order) - 16 <= total <= per_document * 7
    assert total < 0.6 * len(data.train.order) * 16


def test_instruction_columns_and_sharegpt_rows(made):
    rows = [{"instruction": "say", "input": "", "output": "the hat"},
            {"instruction": "say", "input": "cat", "output": "no"}]  # fmt: skip
    keys = {"kind": "instruction", "prompt_keys": ("instruction", "input"), "answer_key": "output"}
    run, tokenizer = made(rows, **keys)
    out, _ = documents(run, tokenizer)
    assert out[0][0].startswith("<|im_start|>user\nsay<|im_end|>")
    assert out[1][0].startswith("<|im_start|>user\nsay\n\ncat<|im_end|>")
    assert [learned for _, learned in out] == ["the hat<|im_end|>\n", "no<|im_end|>\n"]
    talk = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "yes"}]
    run, tokenizer = made([{"conversations": talk}], messages_key="conversations")
    ((whole, learned),), _ = documents(run, tokenizer)
    assert "<|im_start|>user\nthe cat" in whole and learned == "yes<|im_end|>\n"


def test_parquet_fills_missing_keys_with_nothing_and_they_stay_away(made, tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    talk = [*TALK[:2], {"role": "assistant", "content": "yes", "name": "cat"}]
    run, tokenizer = made([{"messages": talk}])
    by_line = documents(run, tokenizer)[0]
    parquet.write_table(pa.table({"messages": [talk], "n": [1]}), tmp_path / "rows.parquet")
    run, tokenizer = made([], source=str(tmp_path / "rows.parquet"))
    assert documents(run, tokenizer)[0] == by_line


def test_max_bytes_ends_between_conversations(made):
    run, tokenizer = made([{"messages": TALK}] * 5, max_bytes=100)
    assert len(documents(run, tokenizer)[0]) == 2  # 42 bytes of content each


def refusal(run):
    with pytest.raises(DataError) as error:
        load_data(run)
    assert "\n" not in str(error.value)
    return str(error.value)


ASKED = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
BAD = [
    ({"message": TALK}, "no 'messages'; did you mean data.messages_key=message?"),
    ({"text": "x"}, "no 'messages'; set data.messages_key to one of text"),
    ({"messages": "hi"}, "'messages' holds str, not a list of messages"),
    ({"messages": []}, "'messages' holds nothing, not a list"),
    ({"messages": ["hi"]}, "message 1 of 'messages' is str, not an object"),
    ({"messages": [{"content": "x"}]}, "message 1 of 'messages' has no role; it has content"),
    ({"messages": [ASKED, {"role": "assistant", "content": 3}]}, "content is int, not text"),
    ({"messages": [ASKED]}, "no message has the role 'assistant', only user"),
    ({"messages": [ANSWER]}, "the first message is an answer; nothing was asked before it"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "says"), BAD)
def test_bad_conversations_are_refused_where_they_stand(made, row, says):
    run, _ = made([{"messages": TALK}, row])
    message = refusal(run)
    assert says in message and "rows.jsonl:2" in message


def test_a_template_that_refuses_is_quoted(made):
    run, _ = made([{"messages": [ASKED, ASKED, ANSWER]}], STRICT)
    says = "the chat template refuses this conversation: Conversation roles must alternate"
    assert says in refusal(run)


def test_a_tokenizer_without_a_template_is_refused(made):
    run, _ = made([{"messages": TALK}], None)
    assert "has no chat template, which data.kind=chat needs" in refusal(run)
    run, _ = made([{"messages": TALK}], tokenizer="bytes")
    assert "'bytes' has no chat template" in refusal(run)


def test_text_is_no_conversation(made, tmp_path):
    (tmp_path / "a.txt").write_text("hello " * 100)
    run, _ = made([], source=str(tmp_path / "a.txt"))
    assert "a.txt: .txt is read as text; chat data stands in .jsonl or .parquet" in refusal(run)
    run, _ = made([], source="stdlib")
    assert "stdlib: holds text, no chat data" in refusal(run)


def test_a_template_that_rewrites_the_question_is_refused(made):
    moved = (
        "{% if add_generation_prompt %}ASK {{ messages[-1].content }}{% else %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% endif %}"
    )
    run, _ = made([{"messages": [ASKED, ANSWER]}], moved)
    assert "cannot be told where the answer begins" in refusal(run)
