"""docs/integrations.md: every Python block runs as written, and every name in its tables exists."""

import functools
import pathlib
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import ottava
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
@pytest.mark.parametrize("section", BLOCKS)
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
    assert len(BLOCKS) == 7 and all(BLOCKS.values())
    for section, code in BLOCKS.items():
        if "ottava.AdamW" in code:
            assert code.index("ottava.convert") < code.index("ottava.AdamW"), section


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
