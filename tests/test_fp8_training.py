"""Runs that start from a folder of FP8 files: what they hold at the start, what it takes, what is refused."""

import json
import re
import weakref

import pytest
import torch
from released_files import Files, read_all, same, small_config
from test_fp8_checkpoint import BAD, SPOILT, TINY, rewrite
from tiny_run import write_text
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ottava
from ottava import prepare
from ottava.cli import main
from ottava.config import ConfigError, Model, Run, run_from_dict
from ottava.kernels.split import SplitParameter, pack_split
from ottava.models.shards import Shards
from ottava.train.trainer import Trainer

SIZES = {**TINY, "vocab_size": 272}


def files_in(folder, shards=3, **changes):
    """(the files, their folder)."""
    files = Files(small_config(**SIZES | changes))
    return files, files.write(folder / "released", shards)


def run_of(folder, preset="fp8-lean", layout="released", **sections):
    """A Run on the FP8 files in `folder`/released."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    plain = {
        "name": "from-fp8",
        "out": str(folder / "run"),
        "device": "cpu",
        "model": {"path": str(folder / "released"), "layout": layout,
                  "overrides": {"num_nextn_predict_layers": 1}},
        "data": {"source": str(text), "sequence_length": 16, "validation_fraction": 0.1},
        "train": {"preset": preset, "steps": 3, "micro_batch": 2, "eval_batches": 2},
        "optimizer": {"lr": 1e-3},
        "precision": {"policy": "mimo"},
    }  # fmt: skip
    for name, changes in sections.items():
        plain[name] = plain.get(name, {}) | changes
    return run_from_dict(plain)


class Alive(TorchDispatchMode):
    """Bytes of tensors made inside and still alive, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known, self.shapes = 0, 0, set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.shapes.add((t.dtype, tuple(t.shape)))
                self._note(t.untyped_storage())
        return out

    def _note(self, storage):
        if storage._cdata in self.known:
            return
        size, key = storage.nbytes(), storage._cdata
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone():
            self.known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def test_a_split_master_is_what_the_files_hold_and_trains(tmp_path):
    files, _ = files_in(tmp_path)
    trainer = Trainer(run_of(tmp_path, optimizer={"lr": 2e-2}))
    splits = 0
    for name, p in trainer.model.named_parameters():
        if isinstance(p, SplitParameter) and p.cast is not None:
            wanted = pack_split(files.truth[name], p.scale, 8)
            assert same(p.data, wanted.codes) and same(p.residual, wanted.residual), name
            splits += 1
        else:
            value = p.dequantize() if isinstance(p, SplitParameter) else p
            assert torch.equal(value.float(), files.truth[name]), name
    assert splits == 2 + 2 + 3 + 1 + 3  # qkv twice, experts' two, dense MLP, MTP's qkv and MLP
    assert trainer.plan.num_fp8 == 9 + 1
    first = trainer.step_once()
    losses = [trainer.step_once().loss for _ in range(12)]
    assert first.stepped and losses[-1] < first.loss - 0.3
    ottava.save_fp8(trainer.model, tmp_path / "trained", "released")
    trained = read_all(tmp_path / "trained")
    assert {n: (t.dtype, t.shape) for n, t in trained.items()} == {
        n: (t.dtype, t.shape) for n, t in files.tensors.items()
    }


@pytest.mark.parametrize("preset", ["fp8", "amp", "fp32"])
def test_fp32_masters_hold_the_exact_values(tmp_path, preset):
    files, _ = files_in(tmp_path)
    precision = {"policy": "mimo"} if preset == "fp8" else {"policy": "default"}
    trainer = Trainer(run_of(tmp_path, preset, precision=precision))
    for name, p in trainer.model.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, files.truth[name]), name
    assert trainer.step_once().stepped


def test_codes_that_the_plan_keeps_high_are_not_rounded_to_bf16(tmp_path):
    files, _ = files_in(tmp_path)
    trainer = Trainer(run_of(tmp_path, precision={"keep": ["*.qkv_proj"]}))
    name = "model.layers.0.self_attn.qkv_proj.weight"
    p, truth = trainer.model.get_parameter(name), files.truth[name]
    assert p.cast is None and not torch.equal(truth.bfloat16().float(), truth)
    error = (p.dequantize() - truth).abs()
    assert (error <= truth.abs() * 2.0**-16).all()
    ottava.save_fp8(trainer.model, tmp_path / "again", "released")
    again = read_all(tmp_path / "again")
    assert all(same(again[n], t) for n, t in files.tensors.items())


def test_the_canonical_layout_trains_the_same(tmp_path):
    files, folder = files_in(tmp_path)
    model = ottava.load_fp8(folder, Trainer(run_of(tmp_path, "fp32")).model, "released")
    folder.rename(tmp_path / "there")
    ottava.save_fp8(model, folder, "canonical")  # says what it is: no layout needed
    trainer = Trainer(run_of(tmp_path, "fp32", layout="auto"))
    q = "model.layers.0.self_attn.qkv_proj.weight"
    for name, p in trainer.model.named_parameters():
        if name.endswith("qkv_proj.weight"):  # cut anew: rounded once more
            assert (p - files.truth[name]).norm() < 0.04 * files.truth[name].norm()
        else:
            assert torch.equal(p, files.truth[name]), name
    assert not torch.equal(trainer.model.get_parameter(q), files.truth[q])


def test_another_family_in_blocks_trains(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=272, hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(config)
    ottava.save_fp8(plain, tmp_path / "released", "canonical")
    run = run_of(tmp_path, layout="auto", model={"overrides": {}}, precision={"policy": "default"})
    trainer = Trainer(run)
    tables = [b for n, b in trainer.model.named_buffers() if n.endswith("inv_freq")]
    assert tables and all(torch.equal(b, c) for b, c in zip(
        tables, [b for n, b in plain.named_buffers() if n.endswith("inv_freq")], strict=True))  # fmt: skip
    weight = trainer.model.get_parameter("model.layers.1.mlp.down_proj.weight")
    truth = plain.model.layers[1].mlp.down_proj.weight
    assert isinstance(weight, SplitParameter)
    assert 0 < (weight.dequantize() - truth).norm() < 0.04 * truth.norm()
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight
    assert trainer.step_once().stepped
    path = trainer.save()
    assert "quantization_config" not in json.loads((path / "config.json").read_text())


def test_loading_takes_less_than_two_shards_beside_the_model(tmp_path, monkeypatch):
    # a matrix of Pro is packed in tenths, these in one piece unless pieces shrink as they do
    monkeypatch.setattr("ottava.models.storage._CHUNK", 1 << 15)
    files, folder = files_in(
        tmp_path, 4, hidden_size=256, n_routed_experts=48, moe_intermediate_size=256
    )
    largest = max(p.stat().st_size for p in folder.glob("*.safetensors"))
    run = run_of(tmp_path)
    with Alive() as alive:
        model, _ = prepare.ready_model(run, torch.device("cpu"))
    held = alive.now
    assert held > 2 * sum(t.numel() for n, t in files.tensors.items() if t.dtype.itemsize == 1)
    assert alive.peak - held <= 2 * largest
    experts = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    wide = {(d, s) for d, s in alive.shapes if s == tuple(experts.shape)}
    assert {d.itemsize for d, _ in wide} == {1}  # no BF16 or FP32 copy, ever


def test_a_norm_that_hides_columns_is_seen_before_the_model_is_converted(tmp_path):
    name = "model.layers.1.input_layernorm.weight"
    files = Files(small_config(**SIZES))
    files.tensors[name][5] = 0.0
    files.write(tmp_path / "released")
    trainer = Trainer(run_of(tmp_path))
    row = trainer.plan[name.removesuffix(".weight")]
    assert row.plain and "too small" in row.reason
    assert trainer.plan["model.layers.0.input_layernorm"].recipe is not None


def test_a_run_continues_and_is_exported(tmp_path, capsys):
    files_in(tmp_path)
    run = run_of(tmp_path, train={"steps": 4, "checkpoint_every": 2})
    whole = Trainer(run).run(quiet=True)
    begun = str(tmp_path / "run/checkpoints/step-00000002")
    again = Trainer(run_of(tmp_path, train={"steps": 4, "resume": begun}))
    assert again.step == 2
    losses = [again.step_once().loss for _ in range(2)]
    assert losses[-1] == whole.loss
    code = main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "released"])
    assert code == 0, capsys.readouterr().err


# ---- bad input ------------------------------------------------------------------------------


def refused(folder, capsys, *overrides):
    """What `ottava train` says of the folder's files; asserts code 2, one line, nothing written."""
    write_text(folder)
    (folder / "run.toml").write_text(
        f'out = "{folder}/run"\ndevice = "cpu"\n[model]\npath = "{folder}/released"\n'
        "[model.overrides]\nnum_nextn_predict_layers = 1\n"
        f'[data]\nsource = "{folder}/text.txt"\nsequence_length = 16\n'
        '[train]\npreset = "fp8-lean"\nsteps = 1\nmicro_batch = 1\n[precision]\npolicy = "mimo"\n'
    )
    capsys.readouterr()
    code = main(["train", str(folder / "run.toml"), *overrides])
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1, said
    assert not (folder / "run").exists()
    return said


def test_the_layout_is_asked_for(tmp_path, capsys):
    _, folder = files_in(tmp_path)
    assert "say layout='released'" in refused(tmp_path, capsys)
    said = refused(tmp_path, capsys, "model.layout=canonical")
    assert "this is the grid of layout 'released'" in said
    assert "did you mean 'released'" in refused(tmp_path, capsys, "model.layout=release")
    assert "none are read here" in refused(
        tmp_path, capsys, "model.layout=released", "model.random_init=true"
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if "quant" not in k})
    )
    assert "holds none" in refused(tmp_path, capsys, "model.layout=released")
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(tmp_path, capsys, "model.layout=released")


@pytest.mark.parametrize("case", ["missing", "renamed", "extra", "scale missing", "scale alone",
                                  "wrong grid", "nan codes", "wrong shape"])  # fmt: skip
def test_a_bad_tensor_is_one_line(tmp_path, capsys, case):
    _, folder = files_in(tmp_path)
    name, change, says = BAD[case]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    rewrite(folder, index["weight_map"][name], change)
    assert re.search(says, refused(tmp_path, capsys, "model.layout=released"))


@pytest.mark.parametrize("case", ["truncated", "shard gone", "block size", "index broken"])
def test_a_bad_folder_is_one_line(tmp_path, capsys, monkeypatch, case):
    _, folder = files_in(tmp_path)
    spoil, says = SPOILT[case]
    spoil(folder)
    monkeypatch.setattr(Shards, "read", None)  # before a byte of a weight is read
    assert re.search(says, refused(tmp_path, capsys, "model.layout=released"))


def test_a_wrong_model_key_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model.layout: 'plain' is not one of"):
        run_of(tmp_path, layout="plain", model={"path": str(tmp_path)}).check()
    with pytest.raises(ConfigError, match="none are read here"):
        Run(model=Model(name="demo", layout="released")).check()
