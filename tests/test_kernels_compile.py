"""The fused kernels compiled for Hopper, on a machine without a GPU: each value is encoded once, loads
and stores are wide, and registers leave room for the programs that an SM must hold."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ottava.kernels import joined, norm, rope, swiglu_codes

KINDS = {
    "*bf16": "x y h residual grad_y grad_h grad_x gate_scale up_scale",
    "*fp32": "weight w0 w1 w2 w_gate w_up scale scale_t code_scale scale_gate scale_up scale_h rstd "
             "weight_parts cos sin",
    "*u8": "codes codes_t rows cols h_cols",
    "*i8": "gate up gate_codes up_codes",
    "*i32": "amax past a0 a1 a2 a_gate a_up a_h new_gate new_up",
    "fp32": "eps sign",
}
KINDS = {name: kind for kind, names in KINDS.items() for name in names.split()}

def compile(kernel, warps, kinds=(), maxnreg=None, **constants):
    types, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], values[(i,)] = "constexpr", constants[name]
        else:
            types[name] = dict(kinds).get(name) or KINDS.get(name, "i32")
            if types[name] != "fp32":
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    options = {"num_warps": warps} | ({"maxnreg": maxnreg} if maxnreg else {})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert re.search(r"ld[.]global[^\\n]*v4", ptx), f"{kernel.__name__}: no 16-byte load"
    return ptx.count("cvt.rn.satfinite"), ptx

GRAD = dict(E4M3=False, POW2=False, MARGIN=0, HARDWARE=True)
NORM = dict(bias=None, CENTER=False, E4M3=True, POW2=False, MARGIN=0, HARDWARE=True, ROWS=2, WIDE=2048)
# elements a thread, two a conversion
assert compile(norm._norm_kernel, 8, **NORM)[0] == 8
compile(norm._norm_backward_kernel, 8, maxnreg=128, bias=None, bias_parts=None, KIND="e4m3",
        NATIVE=True, PER_GROUP=False, CENTER=False, LEAST=2.0**-10, GROUP=128, ROWS=2, WIDE=2048,
        STAGES=3, scale_stride_m=0, scale_stride_k=0)
both = compile(joined._join_cast_kernel, 8, amax_out=None, stride_n=1, BM=64, BN=128, **GRAD)[0]
assert both == 32, both  # rows and columns have scales of their own
forward = [("gate", "*bf16"), ("up", "*bf16")]
assert compile(swiglu_codes._forward_kernel, 8, forward, E4M3=True, POW2=False, MARGIN=0,
               HARDWARE=True, KEEP=True, ROWS=32, GROUP=128)[0] == 8
three, ptx = compile(
    swiglu_codes._codes_kernel, 8, maxnreg=swiglu_codes._REGISTERS, GRAD_E4M3=False,
    GRAD_POW2=False, GRAD_MARGIN=0, H_E4M3=True, H_POW2=False, H_MARGIN=0, HARDWARE=True,
    OVER=False, BM=swiglu_codes._ROWS, BF=128)
assert three == 24 and ptx.count("ex2.approx") == 16  # nothing is made twice for the other order
compile(rope._rope, 4, [("x", "*bf16"), ("out", "*bf16"), ("codes", "*bf16"), ("scale", "*bf16")],
        D=128, R=128, HALF=64, REST=0, BH=16, INT8=False, AMAX=True)
print("compiled")
"""


def test_fused_kernels_compile_for_hopper(tmp_path):
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
