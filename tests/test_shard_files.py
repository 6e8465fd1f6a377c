"""Checkpoints that every rank writes its share of: read by any number of ranks, and by PyTorch."""

import copy
import json
import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gathered import whole
from ranks import run_ranks, start_ranks, wait_for
from safetensors.torch import load_file
from test_checkpoint import same
from test_distributed import steps
from test_fsdp2_masters import alone, bits, lean, one_draw, same_bits
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ottava.distributed.shards import rows_of, shared
from ottava.kernels.split import unpack_split
from ottava.train.checkpoint import Checkpoint, CheckpointError, checkpoints
from ottava.train.evaluate import find_source, load_weights
from ottava.train.export import export
from ottava.train.shard_files import file_name, stored_in, write_rows


def test_rows_written_by_three_are_read_by_all(tmp_path):
    def work(rank):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (3,))
        rows, values = {}, {}
        for count in (1, 2, 3, 4, 7):
            values[f"w{count}"] = torch.arange(count * 5.0).view(count, 5)
            values[f"c{count}"] = values[f"w{count}"].to(torch.float8_e4m3fn)
            values[f"e{count}"] = torch.arange(count * 6, dtype=torch.int16).view(count, 3, 2)
        for name, value in values.items():
            sharded = shared(value, distribute_tensor(value.float(), mesh, [Shard(0)]))
            assert same(whole(sharded), value)
            rows[f"x/{name}"] = rows_of(sharded)
        rows["x/all"] = rows_of(torch.tensor([3.5]))
        write_rows(tmp_path / file_name(rank, 3), rows)
        dist.barrier()
        stored = stored_in(list(tmp_path.glob("*.safetensors")), "x")
        assert stored.keys() == {*values, "all"}
        for name, value in values.items():
            t = stored[name]
            assert t.shape == value.shape and t.dtype == value.dtype and same(t[:], value)
            for a, b in ((0, 1), (1, 3), (2, 9), (5, 6)):
                assert same(t[a:b], value[a:b])
            again = shared(t, distribute_tensor(value.float(), mesh, [Shard(0)]))
            assert same(whole(again), value)
        return float(stored["all"][:])

    assert run_ranks(3, work, tmp_path) == [3.5] * 3


def test_two_then_one_then_three_ranks(tmp_path, monkeypatch):
    """Split masters, 8-bit moments and the average go where the rows go, every bit of them."""
    one_draw(monkeypatch)
    settings = {"out": "moved", "steps": 6, "ema": {"decay": 0.9}, "optimizer": {"fused": "off"}}
    straight = alone(tmp_path, accumulate=6, **settings | {"out": "alone"})
    curve = steps(straight, 2)
    expected = bits(straight)

    def first(rank):
        t = lean(tmp_path, train={"accumulate": 3}, **settings)
        got = steps(t, 2)
        t.save()
        return got, bits(t), {n: whole(s) for n, s in t.ema.shadow.items()}

    got, weights, shadow = run_ranks(2, first, tmp_path)[0]
    assert [g[0] for g in got] == pytest.approx([c[0] for c in curve], rel=1e-4)
    path = checkpoints(tmp_path / "moved" / "checkpoints")[0][1]
    files = {p.name for p in path.iterdir()}
    assert {file_name(0, 2), file_name(1, 2)} <= files and "split.safetensors" not in files
    assert "model.safetensors" not in files  # which would be half of one
    assert len(Checkpoint.open(path).stored("model")) == len(weights) + 1  # and a buffer
    manifest = json.loads((path / "manifest.json").read_text())["files"]
    assert {file_name(0, 2), file_name(1, 2)} <= manifest.keys()

    one = alone(tmp_path, accumulate=6, **settings)
    assert one.step == 2 and same_bits(bits(one), weights)
    assert same(one.ema.shadow, shadow) and one.ema.updates == 2
    moments = copy.deepcopy(one.optimizer.state_dict(weights=False)["state"])
    losses = [r[0] for r in steps(one, 1)]

    def second(rank):
        t = lean(tmp_path, train={"accumulate": 2}, **settings)
        same_weights = same_bits(bits(t), weights)
        state = {}
        for i, p in enumerate(t.strategy.parameters):
            own, all_of_it = t.optimizer.state[p], moments[i]
            state[i] = own.keys() == all_of_it.keys() and own["step"] == 2
            at = rows_of(p).begin
            state[i] &= same(own["m"], all_of_it["m"][at:][: len(own["m"])])
        t.save()
        return t.step, same_weights, all(state.values()), [r[0] for r in steps(t, 1)]

    for step, same_weights, same_state, again in run_ranks(3, second, tmp_path):
        assert step == 2 and same_weights and same_state
        assert again == pytest.approx(losses, rel=1e-4)
    path = checkpoints(tmp_path / "moved" / "checkpoints")[0][1]
    assert {file_name(r, 3) for r in range(3)} <= {p.name for p in path.iterdir()}
    assert same_bits(bits(alone(tmp_path, accumulate=6, **settings)), weights)

    # PyTorch's own distributed checkpoint reads the same folder
    name = "model.layers.0.mlp.down_proj.weight"
    codes, shape = f"split/{name}.codes", expected[name][0].shape
    target = {codes: torch.empty(shape, dtype=torch.float8_e4m3fn)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert same(target[codes], weights[name][0])
    # and one folder of plain safetensors comes out of it
    done = export(path, tmp_path / "exported", dtype="fp32")
    plain = load_file(done.folder / "model.safetensors")
    assert torch.equal(plain[name], one_value(weights[name]))
    model = load_weights(find_source(path), "live", torch.float32, torch.device("cpu"))
    assert torch.equal(model.get_parameter(name), plain[name])


def one_value(parts):
    return unpack_split(parts[0], parts[1], parts[2] if len(parts) > 2 else None)


def test_killed_while_it_writes_and_continued(tmp_path):
    def whole_run(out):
        return lean(tmp_path, out=out, steps=4, train={"checkpoint_every": 1, "keep_last": 9})

    def straight(rank):
        return [g[0] for g in steps(whole_run("straight"), 4)]

    def killed(rank):
        t = whole_run("killed")
        steps(t, 2)
        t.save()
        steps(t, 1)
        move = "ottava.train.shard_save.Shards.move_to"
        monkey = pytest.MonkeyPatch()
        if rank == 0:  # all shards are on the disk, the checkpoint is not
            monkey.setattr(move, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        t.save()

    def again(rank):
        t = whole_run("killed")
        begun = t.step
        losses = [g[0] for g in steps(t, 2)]
        t.save()
        return begun, losses

    expected = run_ranks(2, straight, tmp_path)
    codes = wait_for(start_ranks(2, killed, tmp_path), 30)
    assert codes[0] == -9 and codes[1] == 1
    folder = tmp_path / "killed" / "checkpoints"
    assert [s for s, _ in checkpoints(folder)] == [2]
    assert [(2, e[2:]) for e in expected] == run_ranks(2, again, tmp_path)
    # nothing of the write that was killed is left
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000002", "step-00000004"]


def test_what_is_wrong_with_a_checkpoint_is_said_in_one_line(tmp_path):
    def write(rank):
        t = lean(tmp_path, optimizer={"fused": "off"})
        t.save()
        full = t.strategy.optimizer_state
        t.strategy.optimizer_state = lambda: {"ranks": [None] * 4, "stage": 3}
        t.step = 1
        t.save()
        t.strategy.optimizer_state = full
        real = "ottava.train.shard_save.write_rows"

        def disk_full(path, rows):
            raise OSError(28, "No space left on device")

        if rank == 1:
            pytest.MonkeyPatch().setattr(real, disk_full)
        t.step = 2
        with pytest.raises(CheckpointError, match=r"cannot save step 2 .*No space left") as error:
            t.save()
        return str(error.value)

    assert all("\n" not in line for line in run_ranks(2, write, tmp_path))
    folder = tmp_path / "run" / "checkpoints"
    assert [s for s, _ in checkpoints(folder)] == [1, 0]
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]

    def read(rank):
        with pytest.raises(CheckpointError) as error:
            lean(tmp_path, optimizer={"fused": "off"})
        return str(error.value)

    lines = run_ranks(2, read, tmp_path)
    assert "was written under fsdp2 and does not fit this run's optimizer under fsdp2: it was " \
           "written by ZeRO-3 on 4 rank(s)" in lines[1]  # fmt: skip
    damaged = folder / "step-00000000" / file_name(1, 2)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    shutil.rmtree(folder / "step-00000001")
    with pytest.raises(CheckpointError, match=r"shard-00002-of-00002\.safetensors has"):
        alone(tmp_path, optimizer={"fused": "off"})
    (folder / "step-00000000" / file_name(1, 2)).unlink()
    with pytest.raises(CheckpointError, match=r"shard-00002-of-00002\.safetensors is missing"):
        Checkpoint.open(folder / "step-00000000")
