"""An optimizer's numbers of a step, read from device memory instead of launch arguments.

A captured step (train/graph.py) is launched again with the arguments of its capture, so the
learning rate, the bias corrections and the random key of each step come from a row of eight int32:
[lr, correct1, correct2 (FP32 bits), step, step key, unused x 3]. Same numbers, same bits as from
the host: they are made by the same functions and rounded to FP32 where a launch would round them.
"""

from __future__ import annotations

import math
import struct

import torch

from .op import tl, triton
from .random import step_key, stream_key, triton_stream_key

WIDTH = 8  # 32 bytes: every row is as aligned as a tensor, so no kernel is compiled twice


def corrections(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """What m and sqrt(v) are multiplied by after `step` updates (>= 1): inverse bias corrections."""
    return 1.0 / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step)


def as_fp32(x: float) -> float:
    """x as an FP32 argument of a launch would be."""
    return struct.unpack("=f", struct.pack("=f", x))[0]


def clock_row(lr: float, beta1: float, beta2: float, step: int, seed: int) -> list[int]:
    """One row, as signed 32-bit integers."""
    floats = struct.pack("=fff", lr, *corrections(beta1, beta2, step))
    key = struct.pack("=I", step_key(seed, step))
    return [*struct.unpack("=iii", floats), step, *struct.unpack("=i", key), 0, 0, 0]


def ref_read_clock(row: torch.Tensor, stream: int) -> tuple[float, float, float, int, int]:
    """(lr, correct1, correct2, step, key of `stream`) from a row."""
    values = row.tolist()
    lr, correct1, correct2 = struct.unpack("=fff", struct.pack("=iii", *values[:3]))
    return lr, correct1, correct2, values[3], stream_key(values[4] & 0xFFFFFFFF, stream)


@triton.jit
def read_clock(row, stream):
    """Triton twin of `ref_read_clock`."""
    lr = tl.load(row).to(tl.float32, bitcast=True)
    correct1 = tl.load(row + 1).to(tl.float32, bitcast=True)
    correct2 = tl.load(row + 2).to(tl.float32, bitcast=True)
    return lr, correct1, correct2, tl.load(row + 3), triton_stream_key(tl.load(row + 4), stream)
