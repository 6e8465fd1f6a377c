"""The optimizer's kernels compile for GPUs, on a machine without one, to what their speed needs."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import os
import re
import subprocess
import tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ottava.kernels import adamw, gradient, split

POINTERS = dict(scale="*fp32", amax="*fp32", work="*i32", grad="*bf16", m_scale="*bf16",
                v_range="*i16", low="*fp32", grad_mul="*fp32", found_inf="*fp32", skipped="*i32",
                clock="*i32", parts="*fp32", counter="*i32", norm="*fp32", out="*fp32", codes="*u8")
WHOLE = ("step", "key", "n", "groups", "leads", "per_scale")

def compile(kernel, target, constants, warps=1, **pointers):
    types, values, attributes = {}, {}, {}
    pointers = POINTERS | pointers
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], values[(i,)] = "constexpr", constants[name]
            continue
        types[name] = pointers.get(name, "i32" if name in WHOLE else "fp32")
        if name in pointers or name == "n":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    made = triton.compile(source, target=target, options={"num_warps": warps})
    ptx = made.asm["ptx"]
    # Codes are decoded and encoded as FP32 subnormals: flushing them would lose small weights.
    assert not re.search(r"(mul|fma)\\S*\\.ftz", ptx), kernel.__name__
    assert "global.v4" in ptx, f"{kernel.__name__}: no 16-byte access"
    return made

def instructions(made):
    # of the largest loop; registers and bytes of stack of a thread
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"]), file.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
        sass, use = (subprocess.run([tool, option, file.name], capture_output=True, text=True).stdout
                     for option in ("-sass", "-res-usage"))
    lines = re.findall(r"/[*]([0-9a-f]{4,})[*]/\\s+(.*?);", sass)
    jumps = ((int(at, 16), re.search(r"BRA.* 0x([0-9a-f]+)", text)) for at, text in lines)
    size = max(at - int(to[1], 16) for at, to in jumps if to)
    return size // 16 + 1, int(re.search(r"REG:(\\d+)", use)[1]), int(re.search(r"STACK:(\\d+)", use)[1])

def step(master, bits, states, full, clock=False, packed=True):
    return dict(MASTER=master, BITS=bits, STATES=states, LOW="none", LR_TENSOR=full, MUL=full,
                GUARD=full or clock, COUNTED=full, CLOCK=clock, MARGIN=0, LEADS=4 if full else 1, TILE=adamw._TILE, EVEN=not full,
                FAST=True, PACKED=packed)

h100, a100 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
lean = dict(param="*u8", residual="*i8", m="*u8", v="*u8")
made = compile(adamw._adamw_kernel, h100, step("codes", 8, "8bit", False), **lean)
# All of a group's row lies in one warp's registers: tiles never pass through shared memory.
assert "st.shared" not in made.asm["ptx"]
count, registers, stack = instructions(made)
# 16 elements a thread. 64 K registers for 24 warps; nothing spilled.
assert 40 * 16 < count <= 58 * 16 and registers <= 84 and stack == 0, (count / 16, registers, stack)
compile(adamw._adamw_kernel, h100, step("codes", 8, "8bit", False, clock=True), **lean)
compile(adamw._adamw_kernel, a100, step("codes", 8, "8bit", True, packed=False), lr="*fp32", **lean)
compile(adamw._adamw_kernel, h100, step("codes", 8, "8bit", True), lr="*fp32", **lean)
compile(adamw._adamw_kernel, h100, step("split", 16, "bf16", True), lr="*fp32",
        param="*i16", residual="*i16", m="*i16", v="*i16")
compile(gradient._measure_kernel, h100, dict(BLOCK=4096, PROGRAMS=1024), 4)
compile(split._unpack_kernel, h100, dict(BITS=8, CODES=True, BLOCK=2048), 4,
        residual="*i8")
print("compiled")
"""


def test_kernels_compile_for_gpus_without_one(tmp_path):
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
