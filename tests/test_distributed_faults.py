"""A rank that dies, hangs or fails; random numbers that ranks draw apart and take up again."""

import os
import signal
import socket
import time

import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks, wait_for
from test_distributed import ranks_run, steps

import ottava.distributed.watch as watching
from ottava.distributed.ranks import leave
from ottava.distributed.watch import Watch
from ottava.train.checkpoint import Checkpoint, checkpoints
from ottava.train.trainer import Trainer


def test_a_dead_rank_ends_those_that_wait_for_their_device(tmp_path, monkeypatch):
    """Rank 1 dies; rank 0 stands where no exception reaches it, rank 2 ends by itself."""
    monkeypatch.setattr(watching, "GRACE_S", 1.0)

    def work(rank):
        t = Trainer(ranks_run(tmp_path, "fp32"))
        t.step_once()
        t.save()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60 if rank == 0 else 0.5)  # as a wait for the GPU does

    begun = time.monotonic()
    codes = wait_for(start_ranks(3, work, tmp_path), 40)
    assert codes == [1, -signal.SIGKILL, 0] and time.monotonic() - begun < 30
    said = (tmp_path / "rank0.txt").read_text()
    assert said.count("\n") == 1 and "ottava: rank 0: lost rank 1, see its own message" in said
    assert Checkpoint.open(checkpoints(tmp_path / "run" / "checkpoints")[0][1]).step == 1


def test_one_that_fails_says_no_goodbye_and_one_that_ends_does(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "GRACE_S", 0.5)

    def fails(rank):
        t = Trainer(ranks_run(tmp_path, "fp32"))

        def step():
            if rank == 1:
                raise LookupError("no luck")
            time.sleep(60)

        t.step_once = step
        try:
            t.run(quiet=True)
        finally:
            leave()  # as the interpreter does when it ends

    begun = time.monotonic()
    assert wait_for(start_ranks(2, fails, tmp_path), 40) == [1, 1]
    assert time.monotonic() - begun < 30
    assert "LookupError: no luck" in (tmp_path / "rank1.txt").read_text()
    assert "lost rank 1" in (tmp_path / "rank0.txt").read_text()

    def ends(rank):
        Trainer(ranks_run(tmp_path, "fp32"))
        time.sleep(2.0 if rank == 0 else 0.0)  # well beyond the grace

    run_ranks(2, ends, tmp_path)


def test_strangers_are_turned_away(tmp_path, monkeypatch):
    def work(rank):
        dist.init_process_group("gloo")

        def on_main(make):
            answer = [make() if rank == 0 else None]
            dist.broadcast_object_list(answer, src=0)
            if rank == 1:  # first a stranger, then this rank
                socket.create_connection(("127.0.0.1", answer[0][0])).sendall(b"guess 1\n")
            return answer[0]

        watch = Watch(rank, 2, on_main)
        peers = list(watch._peers.values())
        dist.barrier()
        watch.goodbye(), watch.close()
        return peers

    assert run_ranks(2, work, tmp_path) == [[1], [0]]


def test_each_rank_takes_up_its_own_random_numbers(tmp_path):
    """Dropout, shuffled data, and ranks that draw unlike amounts: bitwise after a new start."""

    def part(out, number, save):
        def work(rank):
            return {s: curve(rank, s, out, number, save) for s in ("ddp", "fsdp2")}

        return run_ranks(2, work, tmp_path)

    def curve(rank, strategy, out, number, save):
        out = f"{out}-{strategy}"
        t = Trainer(ranks_run(tmp_path, "fp32", out=out, distributed={"strategy": strategy},
                              data={"shuffle": True}))  # fmt: skip
        masks = []

        def drop(module, args, y):
            kept = torch.nn.functional.dropout(torch.ones_like(y), 0.2)
            masks.append(float(kept.flatten()[:64].sum()))
            if rank:
                torch.rand(3)
            return y * kept

        t.model.model.embed_tokens.register_forward_hook(drop)
        losses = [r[0] for r in steps(t, number)]
        if save:
            t.save()
        return losses, masks

    straight, first, then = (
        part(*p) for p in (("straight", 4, False), ("half", 2, True), ("half", 2, False))
    )
    for whole, a, b in zip(straight, first, then, strict=True):
        for strategy, (losses, masks) in whole.items():
            assert a[strategy][0] + b[strategy][0] == losses
            assert a[strategy][1] + b[strategy][1] == masks
    assert straight[0]["ddp"][1] != straight[1]["ddp"][1]  # the ranks drop other elements
