"""docs/integrations.md: every Python block runs as written, and every name in its tables exists."""

import functools
import pathlib
import re
import shlex

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import ottava
from ottava.config import load_run
from ottava.distributed.ds_config import apply, read
from ottava.kernels.gemm import fp8_gemms

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
SECTIONS = re.split(r"^## ", TEXT, flags=re.M)[1:]
BLOCKS = {
    s.splitlines()[0]: "\n".join(re.findall(r"^```python\n(.*?)^```", s, re.M | re.S))
    for s in SECTIONS
}
NEEDS = {
    "Hugging Face Trainer": "accelerate",
    "accelerate": "accelerate",
    "Lightning": "pytorch_lightning",
    "PEFT: LoRA and DoRA on an FP8 base": "peft",
}


def surroundings(folder):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=96,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    data = [{"input_ids": x, "labels": x} for i in range(8) for x in [(torch.arange(16) + i) % 96]]
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    return {"model": model, "data": data, "loader": loader, "folder": str(folder)}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("section", [s for s in BLOCKS if BLOCKS[s]])
def test_blocks_run_as_written(section, tmp_path, monkeypatch, capsys):
    if section in NEEDS:
        pytest.importorskip(NEEDS[section])
    if not torch.cuda.is_available():
        on_cpu = functools.partialmethod(TrainingArguments.__init__, use_cpu=True)
        monkeypatch.setattr(TrainingArguments, "__init__", on_cpu)
    names, before = surroundings(tmp_path), fp8_gemms()
    exec(compile(BLOCKS[section], section, "exec"), names)
    assert fp8_gemms() > before
    if "save_" in BLOCKS[section]:
        saved = {f.name for f in tmp_path.iterdir()}
        assert saved & {"model.safetensors", "adapter_model.safetensors"}


def test_every_section_has_a_block_and_the_rule_holds():
    assert len(BLOCKS) == 8 and [s for s in BLOCKS if not BLOCKS[s]] == ["DeepSpeed"]
    for section, code in BLOCKS.items():
        if "ottava.AdamW" in code:
            assert code.index("ottava.convert") < code.index("ottava.AdamW"), section


def test_deepspeed_is_started_as_written(tmp_path):
    section = next(s for s in SECTIONS if s.startswith("DeepSpeed"))
    (given,) = re.findall(r"^```json\n(.*?)^```", section, re.M | re.S)
    (tmp_path / "ds_config.json").write_text(given)
    (tmp_path / "run.toml").write_text(
        '[model]\nname = "dense-100m"\n[data]\nsource = "random"\n[train]\nmicro_batch = 2\n'
        "accumulate = 4\n"
    )
    (lines,) = re.findall(r"^```bash\n(.*?)^```", section, re.M | re.S)
    for line in lines.strip().splitlines():
        words = shlex.split(line)
        at = words.index("ottava")
        assert words[at + 1 :] == ["train", "run.toml", "--deepspeed", "ds_config.json"]
    path = tmp_path / "ds_config.json"
    run = load_run(
        tmp_path / "run.toml",
        ["distributed.strategy=deepspeed", f"distributed.deepspeed={path}"],
    )
    changed = apply(read(path), run, world=4)
    assert "fp8" not in changed.engine and changed.stage == 2 and changed.notes


def test_tables_name_what_exists():
    pytest.importorskip("accelerate")
    from ottava.integrations.hf_trainer import LOGITS, OPTIMIZERS

    table = re.findall(r'^\| `"([\w-]+)"` \| .* \| (\d+) \|$', TEXT, re.M)
    assert [name for name, _ in table] == list(OPTIMIZERS)
    for name, nbytes in table:
        # FP32 weights: 4 bytes, split16: 2; two moments of 4 or 1 bytes
        weight = {"fp32": 4, "split16": 2}[OPTIMIZERS[name]["master"]]
        assert weight + 2 * {"fp32": 4, "8bit": 1}[OPTIMIZERS[name]["states"]] == int(nbytes)
    assert set(re.findall(r'logits="(\w+)"', TEXT)) <= set(LOGITS)
    for name in re.findall(r"`te\.([\w.]+)`", TEXT):
        target = ottava
        for part in name.split("."):
            target = getattr(target, part)
