"""Checkpoints: every bit back, damage found and named, the one before never touched."""

import errno
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ottava.kernels.split import SplitParameter, split_parameter
from ottava.numerics.recipe import TENSOR
from ottava.train import checkpoint as ckpt
from ottava.train.checkpoint import Checkpoint, CheckpointError, latest_good, load_weights
from ottava.train.resume import random_state, set_random_state
from ottava.train.serialize import Sink, flatten, unflatten
from ottava.train.writing import save

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def same(a, b):
    """Equal in every type and bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*raw)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.body = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def split_net():
    net = Net()
    split_parameter(net.body.weight, 8, TENSOR.weight)
    split_parameter(net.embed.weight, 16, None)
    return net


def saved(tmp_path, step=1, net=None, **sections):
    return save(tmp_path, step, model=Net() if net is None else net, sections=sections)


def test_state_comes_back_with_every_type_and_bit(tmp_path):
    state = {
        "tensors": [torch.randn(3, 2).to(d) for d in DTYPES],
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "strided": torch.randn(4, 6).t()[1:],
        0: {"step": 3, (1, "a"): None},
        "numbers": (1, 2**70, 0.1, float("inf"), -float("inf"), float("nan"), True, "text"),
        "$tensor": {"$dict": 1},
        "dtype": torch.bfloat16,
    }
    path = saved(tmp_path, anything=state)
    assert same(Checkpoint.open(path).section("anything"), state)
    skeleton, tensors = flatten(state, "s")
    assert same(unflatten(json.loads(json.dumps(skeleton)), tensors), state)


def test_what_cannot_be_stored_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match=r"s\.a\.0: a function cannot be stored"):
        saved(tmp_path, s={"a": [lambda: 0]})
    assert os.listdir(tmp_path) == []


def test_weights_are_plain_safetensors_with_tied_ones_once(tmp_path):
    net = Net()
    path = saved(tmp_path, net=net)
    weights = load_file(path / "model.safetensors")
    assert set(weights) == {"embed.weight", "body.weight", "offset"}
    assert Checkpoint.open(path).skeleton["aliases"] == {"head.weight": "embed.weight"}
    assert torch.equal(weights["body.weight"], net.body.weight)


def test_compiled_model_is_stored_under_its_own_names(tmp_path):
    net = Net()
    path = saved(tmp_path, net=torch.compile(net))
    assert "body.weight" in load_file(path / "model.safetensors")
    other = Net()
    load_weights(other, Checkpoint.open(path))
    assert torch.equal(other.body.weight, net.body.weight)


def test_split_masters_come_back_bitwise_and_as_plain_weights(tmp_path):
    net = split_net()
    path = saved(tmp_path, net=net)
    plain = load_file(path / "model.safetensors")
    assert plain["body.weight"].dtype == torch.float32
    assert torch.equal(plain["body.weight"], net.body.weight.dequantize())
    other = split_net()
    with torch.no_grad():
        other.body.weight.write(torch.randn(8, 8))
    objects = dict(other.named_parameters())
    load_weights(other, Checkpoint.open(path))
    for name, p in net.named_parameters():
        q = other.get_parameter(name)
        assert q is objects[name] and isinstance(q, SplitParameter)
        for part in ("data", "residual", "scale", "amax"):
            mine, theirs = getattr(p, part), getattr(q, part)
            assert (mine is None and theirs is None) or same(mine.detach(), theirs.detach())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.Linear(2, 2), "is from another model: it has no weight"),
        (lambda: Net(4), r"embed.weight is \[6, 8\] there and \[6, 4\] here"),
        (lambda: Net().bfloat16(), "has offset as torch.float32 .* this run as torch.bfloat16"),
        (split_net, "has a plain master for embed.weight, this run a split one"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(tmp_path, make, message):
    checkpoint = Checkpoint.open(saved(tmp_path))
    with pytest.raises(CheckpointError, match=message) as e:
        load_weights(make(), checkpoint)
    assert "\n" not in str(e.value)


def test_a_model_that_lacks_a_weight_is_refused(tmp_path):
    net = Net()
    net.extra = nn.Linear(2, 2)
    checkpoint = Checkpoint.open(saved(tmp_path, net=net))
    with pytest.raises(CheckpointError, match=r"this one has no extra\.bias"):
        load_weights(Net(), checkpoint)


def flip(file, at=-3):
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def cut(file):
    os.truncate(file, file.stat().st_size - 5)


FILES = ["model.safetensors", "s.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "harm, word", [(flip, "damaged"), (cut, "truncated"), (Path.unlink, "incomplete")]
)
def test_damage_is_found_and_the_older_one_used(tmp_path, file, harm, word):
    older = saved(tmp_path, 1, s=[torch.ones(3)])
    newer = saved(tmp_path, 2, s=[torch.ones(3)])
    harm(newer / file)
    if (file, word) == ("manifest.json", "truncated"):
        word = "damaged"
    with pytest.raises(CheckpointError, match=f"{word}.*{file}") as e:
        Checkpoint.open(newer)
    assert "\n" not in str(e.value)
    found, skipped = latest_good(tmp_path)
    assert found.path == older and found.step == 1
    assert len(skipped) == 1 and "step-00000002" in skipped[0] and word in skipped[0]


def test_missing_checkpoint_and_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(tmp_path / "step-00000007")
    assert latest_good(tmp_path) == (None, [])
    assert latest_good(tmp_path / "nothing") == (None, [])
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        Checkpoint.open(saved(tmp_path)).section("optimizer")


def test_another_format_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "VERSION", 99)
    path = saved(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format version 99; this version reads 1"):
        Checkpoint.open(path)


def test_keeps_the_last_ones_and_clears_leftovers(tmp_path):
    (tmp_path / ".partial-step-00000001-99").mkdir()
    (tmp_path / ".partial-step-00000001-99" / "model.safetensors").write_text("half")
    for step in (1, 2, 3):
        save(tmp_path, step, model=Net(), sections={}, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


def test_going_back_sets_later_checkpoints_aside(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, model=Net(), sections={}, keep_last=5)
    ckpt.set_aside_after(tmp_path, 1)
    assert [s for s, _ in ckpt.checkpoints(tmp_path)] == [1]
    assert (tmp_path / "unused-step-00000003").is_dir()
    save(tmp_path, 2, model=Net(), sections={}, keep_last=1)
    assert [s for s, _ in ckpt.checkpoints(tmp_path)] == [2]


def test_a_later_checkpoint_of_another_history_never_costs_the_new_one(tmp_path):
    saved(tmp_path, 9)
    save(tmp_path, 2, model=Net(), sections={}, keep_last=1)
    assert [s for s, _ in ckpt.checkpoints(tmp_path)] == [9, 2]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    saved(tmp_path, 1, s=1)
    assert Checkpoint.open(saved(tmp_path, 1, s=2)).section("s") == 2
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("after", [0, 100, 700, 1200])
def test_disk_full_leaves_the_one_before_and_no_rest(tmp_path, monkeypatch, after):
    saved(tmp_path, 1, s=[torch.ones(64)])
    written = 0
    write = Sink.write

    def full(self, data):
        nonlocal written
        written += len(data)
        if written > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(Sink, "write", full)
    with pytest.raises(CheckpointError, match=r"cannot save step 2 .*No space left") as e:
        saved(tmp_path, 2, s=[torch.ones(64)])
    assert "the checkpoint of step 1 is intact" in str(e.value) and "\n" not in str(e.value)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert latest_good(tmp_path)[0].step == 1


def test_an_interrupted_save_leaves_no_rest(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ckpt.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    saved(small_disk, 1)
    with pytest.raises(CheckpointError, match=r"No space left on device .*step 1 is intact"):
        saved(small_disk, 2, s=[torch.zeros(1 << 15)])
    assert os.listdir(small_disk) == ["step-00000001"]
    assert latest_good(small_disk)[0].step == 1


def test_random_states_come_back(tmp_path):
    net = Net()
    path = saved(tmp_path, net=net, random=random_state())
    draw = lambda: (torch.rand(3), random.random(), numpy.random.rand(2).tolist())  # noqa: E731
    first = draw()
    set_random_state(Checkpoint.open(path).section("random"))
    assert same(draw(), first)


def test_nothing_is_unpickled():
    package = Path(ckpt.__file__).parents[1]
    source = "".join(p.read_text() for p in (package / "train").glob("*.py"))
    assert "pickle" not in source.replace("unpickled", "").replace("pickled", "")
    assert "torch.load" not in source and "torch.save" not in source
