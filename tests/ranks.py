"""Several gloo ranks for a test: forked processes, so that nothing is imported twice."""

import os
import signal
import socket
import sys
import time
import traceback

import torch

from ottava.distributed.ranks import leave


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_ranks(world, work, folder):
    """Fork `world` processes that each call `work(rank)`; their process ids. What they return is
    put into `folder`, what they print goes to files there."""
    port, pids = free_port(), []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            _child(world, rank, port, work, folder)
        pids.append(pid)
    return pids


def _child(world, rank, port, work, folder):
    code = 1
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        out = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        result = work(rank)
        torch.save(result, folder / f"rank{rank}.pt")
        leave()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait_for(pids, seconds):
    """Exit codes (negative: a signal); those still alive after `seconds` are killed."""
    codes, end = {}, time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def run_ranks(world, work, folder, seconds=60):
    """What `work(rank)` returns on each of `world` ranks. AssertionError with its traceback if one
    fails, or if they have not ended after `seconds`."""
    codes = wait_for(start_ranks(world, work, folder), seconds)
    texts = [(folder / f"rank{r}.txt").read_text() for r in range(world)]
    failed = [f"rank {r} ended with {c}:\n{texts[r]}" for r, c in enumerate(codes) if c]
    assert not failed, "\n".join(failed)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(world)]
