"""Casts to 8 bits: exhaustive against torch, then Triton against the reference, bit for bit.

Where a reference is compared with itself in another layout or order, equality is exact. `device`
is the GPU where there is one (its conversion instruction is then what is tested), else the CPU
under Triton's interpreter.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from ottava.kernels import cast as C
from ottava.kernels import int8 as I8
from ottava.kernels import scale as S
from ottava.kernels.cast import (
    Quantized,
    amax,
    dequantize_int8,
    quantize,
    quantize_both,
    quantize_int8,
    scale_from_amax,
    transpose,
)
from ottava.numerics.formats import E4M3, E5M2, INT8_CAST_DB, error_db
from ottava.numerics.recipe import Cast

FORMATS = (E4M3, E5M2)
GRAINS = ("tensor", "row", "group", "block")
SHAPES = ((1, 1), (3, 129), (130, 17), (129, 257))
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    flat = (t.cpu().reshape(-1).clone().view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


def run(fn, x, fmt, grain, *, scale=None, amax=None, amax_out=None, pow2=False, margin=0,
        stochastic=False, key=0, both=False):  # fmt: skip
    """`ref_quantize` or `triton_quantize` with everything optional."""
    return fn(x, scale, amax, amax_out, fmt.name, grain, pow2, margin, stochastic, key, both)


def implementations(device):
    return ((C.ref_quantize, "cpu"), (C.triton_quantize, device))


def all_codes(fmt) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(fmt.dtype).reshape(16, 16)


def all_bfloat16() -> torch.Tensor:
    return torch.arange(65536).to(torch.uint16).view(torch.bfloat16).reshape(256, 256)


def expected_codes(x: torch.Tensor, fmt) -> torch.Tensor:
    """torch's own cast of the clamped value; one NaN code; infinities as documented."""
    x = x.float()
    codes = x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    codes[x.isnan()] = 0x7F
    codes[x == torch.inf] = 0x7C if fmt.has_inf else 0x7F
    codes[x == -torch.inf] = 0xFC if fmt.has_inf else 0x7F
    return codes.view(fmt.dtype)


# ---- codes ----


@by_format
def test_every_code_round_trips(fmt, device):
    codes = all_codes(fmt)
    one = torch.ones(1)
    values = C.ref_dequantize(codes, one, "tensor", torch.float32)
    from_triton = C.triton_dequantize(
        codes.to(device), one.to(device), "tensor", torch.float32
    ).cpu()
    assert torch.equal(values.nan_to_num(7.0), from_triton.nan_to_num(7.0))
    assert values[values.isfinite()].abs().max() == fmt.max
    want = codes.view(torch.uint8).clone()
    want[values.isnan()] = 0x7F
    for fn, where in implementations(device):
        got, _ = run(fn, values.to(where), fmt, "tensor", scale=one.to(where))
        assert same(got, want.view(fmt.dtype))


@by_format
def test_every_bfloat16_casts_as_torch_does(fmt, device):
    x = all_bfloat16()
    one = torch.ones(1)
    for fn, where in implementations(device):
        got, scale = run(fn, x.to(where), fmt, "tensor", scale=one.to(where))
        assert same(got, expected_codes(x, fmt)) and scale.item() == 1.0


@by_format
def test_ties_and_their_neighbours_in_fp32(fmt, device):
    values = all_codes(fmt).float().flatten()
    values = values[values.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    up, down = (torch.nextafter(middle, torch.tensor(t)) for t in (torch.inf, -torch.inf))
    x = torch.cat([middle, up, down]).reshape(3, -1)
    for fn, where in implementations(device):
        got, _ = run(fn, x.to(where), fmt, "tensor", scale=torch.ones(1, device=where))
        assert same(got, expected_codes(x, fmt))


def test_too_large_numbers_clamp_on_any_version():
    one = torch.ones(1)
    x = torch.tensor([[448.0, 464.0, 465.0, 1000.0, -1000.0, 1e30]])
    q = quantize(x, Cast(), scale=one)
    assert q.dequantize().tolist() == [[448.0, 448.0, 448.0, 448.0, -448.0, 448.0]]
    q = quantize(torch.tensor([[57344.0, 61440.0, -1e5]]), Cast(format="e5m2"), scale=one)
    assert q.dequantize().tolist() == [[57344.0, 57344.0, -57344.0]]


# ---- Triton = reference ----


CASES = [
    # fmt, grain, pow2, margin, stochastic, both: every value beside every other at least once
    (E4M3, "tensor", True, 0, False, True),
    (E5M2, "tensor", False, 1, True, True),
    (E4M3, "tensor", False, 0, True, False),
    (E4M3, "row", False, 1, True, True),
    (E5M2, "row", True, 0, False, True),
    (E4M3, "row", True, 0, False, False),
    (E5M2, "row", False, 0, True, False),
    (E4M3, "group", False, 0, False, True),
    (E5M2, "group", True, 1, True, True),
    (E4M3, "group", True, 0, False, False),
    (E4M3, "block", True, 0, True, True),
    (E5M2, "block", False, 0, False, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, (c[0].name, *c[1:]))))
def test_triton_equals_reference(case, device):
    fmt, grain, pow2, margin, stochastic, both = case
    for i, shape in enumerate(SHAPES):
        x = torch.randn(shape).to((torch.bfloat16, torch.float32)[i % 2])
        if i == 2:
            x[5, 3], x[6, 4], x[7, 5], x[8] = torch.nan, torch.inf, -torch.inf, 0.0
        rest = (None, None, None, fmt.name, grain, pow2, margin, stochastic, 2**31 - 9, both)
        want, got = C.ref_quantize(x, *rest), C.triton_quantize(x.to(device), *rest)
        assert len(want) == len(got) and all(map(same, got, want)), shape


def test_triton_reads_strides(device):
    base = torch.randn(150, 40, dtype=torch.bfloat16, device=device)
    views = base.t(), base[::2, 3:20], base[:1].expand(9, 40), base[:, :1].expand(150, 8)
    for i, x in enumerate(views):
        grain = GRAINS[i]
        want = run(C.ref_quantize, x.cpu().contiguous(), E4M3, grain, both=True)
        got = run(C.triton_quantize, x, E4M3, grain, both=True)
        assert all(map(same, got, want)), (i, grain)
    assert S.triton_amax(base.t()).item() == base.abs().max().item()
    assert S.triton_amax(base[::2, 3:20]).item() == base[::2, 3:20].abs().max().item()
    rows = run(C.triton_quantize, base[:, 1:34], E5M2, "row")
    assert all(map(same, rows, run(C.ref_quantize, base[:, 1:34].cpu(), E5M2, "row")))


def test_triton_known_amax_and_recorded_amax(device):
    x = torch.randn(70, 130, device=device)
    top = S.triton_amax(x)
    for grain, known in (("tensor", {"amax": top}), ("row", {}), ("group", {})):
        record = torch.zeros(1, device=device)
        got = run(C.triton_quantize, x, E4M3, grain, amax_out=record, **known)
        assert all(map(same, got, run(C.ref_quantize, x.cpu(), E4M3, grain))) and same(record, top)
    record = top * 2  # the maximum of what was there and what came
    run(C.triton_quantize, x, E4M3, "tensor", scale=top / 99, amax_out=record)
    assert same(record, top * 2)


def test_triton_scales(device):
    tops = torch.cat([
        torch.tensor([0.0, 1e-45, 1e-38, 1e-36, 1e-35, 3e38, torch.inf, torch.nan]),
        torch.linspace(320, 640, 400), 2.0 ** torch.arange(-148, 128),
    ])  # fmt: skip
    for name, pow2, margin in (("e4m3", True, 0), ("e5m2", True, 3), ("e4m3", False, -2)):
        want = S.ref_scale_from_amax(tops, name, pow2, margin)
        assert same(S.triton_scale_from_amax(tops.to(device), name, pow2, margin), want)


@by_format
def test_triton_transpose_and_dequantize(fmt, device):
    x = torch.randn(131, 259)
    for grain in GRAINS:
        codes, scale = run(C.ref_quantize, x, fmt, grain)
        got = C.triton_dequantize(codes.to(device), scale.to(device), grain, torch.float32)
        assert same(got, C.ref_dequantize(codes, scale, grain, torch.float32))
    assert same(C.triton_transpose_codes(codes.to(device)), C.ref_transpose_codes(codes))
    batch = torch.stack([codes.view(torch.uint8)] * 2).view(fmt.dtype)
    assert same(C.triton_transpose_codes(batch.to(device)), C.ref_transpose_codes(batch))


# ---- scales ----


@pytest.mark.parametrize("kind", ("fp32", "pow2"))
@by_format
def test_scale_is_finite_for_any_amax(fmt, kind):
    tops = torch.tensor([0.0, 1e-45, 1e-38, 1e-36, 1e-35, 1.0, 3e38, torch.inf, torch.nan])
    for margin in (0, 5, -5):
        scale = scale_from_amax(tops, Cast(format=fmt.name, scale_kind=kind, margin=margin))
        assert (scale > 0).all() and scale.isfinite().all() and (1 / scale).isfinite().all()
        assert scale[0] == scale[-1] == scale[-2] == 1.0
    for top in tops[:6].tolist():
        q = quantize(torch.tensor([[top, -top / 2]]), Cast(format=fmt.name, scale_kind=kind))
        assert q.dequantize().isfinite().all()
        assert top > 0 or not q.dequantize().any()


@by_format
def test_power_of_two_scales_never_clip(fmt):
    tops = torch.linspace(320, 640, 1000) * (fmt.max / 448)
    tops = torch.cat([tops, torch.nextafter(torch.tensor([fmt.max]), torch.tensor(torch.inf))])
    scale = scale_from_amax(tops, Cast(format=fmt.name, scale_kind="pow2"))
    assert (tops / scale <= fmt.max).all() and (torch.frexp(scale).mantissa == 0.5).all()
    assert (tops / (scale / 2) > fmt.max).all()  # and none is larger than it must be


def test_margin_is_a_power_of_two():
    top = torch.tensor([3.0])
    plain, wide = (scale_from_amax(top, Cast(margin=m)) for m in (0, 1))
    assert wide == 2 * plain and plain == torch.tensor([3.0]) / 448


def test_amax_propagates_non_finite(device):
    for fn, where in ((amax, "cpu"), (S.triton_amax, device)):
        x = torch.randn(5, 70, dtype=torch.bfloat16, device=where)
        assert fn(x).item() == x.abs().max().item() and fn(x).shape == (1,)
        x[3, 1] = -torch.inf
        assert fn(x).item() == torch.inf
        x[2, 2] = torch.nan
        assert fn(x).isnan().all()
        assert fn(x[:0]).item() == 0.0 and fn(x[:0]).dtype is torch.float32


# ---- stochastic rounding ----


@by_format
def test_stochastic_mean_and_neighbours(fmt, device):
    samples = 1 << 16
    low = fmt.smallest_subnormal
    values = [1.03, 300.1, fmt.smallest_normal * 0.97, low * 2.4, low * 0.9, low * 0.013, 0.0]
    grid = all_codes(fmt).float().flatten()
    grid = grid[grid.isfinite()].unique()
    x = torch.tensor(values)[:, None].expand(-1, samples) * torch.tensor([1.0, -1.0]).repeat(
        samples // 2
    )
    one = torch.ones(1)
    got, _ = run(C.ref_quantize, x, fmt, "tensor", scale=one, stochastic=True, key=11)
    rounded = got.double() * x.sign().double().where(x != 0, torch.ones(()).double())
    for row, value in zip(rounded, values, strict=True):
        below, above = grid[grid <= value].max().item(), grid[grid >= value].min().item()
        assert set(row.unique().tolist()) <= {below, above}
        if below == above:
            continue
        p = (value - below) / (above - below)
        sigma = (above - below) * (p * (1 - p) / samples) ** 0.5
        assert abs(row.mean().item() - value) < 5 * sigma
    few = x[:, :40].contiguous()
    want = run(C.ref_quantize, few, fmt, "tensor", scale=one, stochastic=True, key=11)
    few, one = few.to(device), one.to(device)
    got = run(C.triton_quantize, few, fmt, "tensor", scale=one, stochastic=True, key=11)
    assert all(map(same, got, want))


@by_format
def test_stochastic_leaves_codes_alone_and_never_clips(fmt):
    cast = Cast(format=fmt.name, rounding="stochastic")
    one = torch.ones(1)
    codes = all_codes(fmt)
    finite = codes.float().isfinite()
    for key in range(8):
        q = quantize(codes.float().where(finite, torch.zeros(())), cast, scale=one, key=key)
        assert torch.equal(q.codes.float()[finite], codes.float()[finite])
        big = quantize(torch.full((4, 64), fmt.max * 0.999), cast, scale=one, key=key)
        assert big.codes.float().max() <= fmt.max
    special = torch.tensor([[torch.nan, torch.inf, -torch.inf]])
    got = quantize(special, cast, scale=one).codes
    assert same(got, expected_codes(special, fmt))


def test_stochastic_bits_come_from_the_key():
    x = torch.randn(64, 64)
    cast = Cast(rounding="stochastic")
    a, b, c = (quantize(x, cast, key=k).codes for k in (1, 1, 2))
    assert same(a, b) and not same(a, c)


# ---- orders, layouts, arguments ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_orders_equal_separate_casts(shape):
    x = torch.randn(shape)
    for grain, fmt, kind in itertools.product(GRAINS, FORMATS, ("fp32", "pow2")):
        cast = Cast(format=fmt.name, granularity=grain, scale_kind=kind)
        rows, cols = quantize_both(x, cast)
        alone, alone_t = quantize(x, cast), quantize(x.t(), cast)
        for got, want in ((rows, alone), (cols, alone_t)):
            assert same(got.codes, want.codes) and same(got.scale, want.scale)
            assert got.codes.is_contiguous() and got.granularity == grain
        if grain in ("tensor", "block"):
            back = transpose(rows)
            assert same(back.codes, cols.codes) and same(back.scale, cols.scale)
            assert torch.equal(back.dequantize(), rows.dequantize().t())
        else:
            with pytest.raises(ValueError, match="quantize_both"):
                transpose(rows)


@pytest.mark.parametrize("grain", GRAINS)
@by_format
def test_round_trip_error_and_shapes(fmt, grain):
    x = torch.randn(256, 384)
    q = quantize(x, Cast(format=fmt.name, granularity=grain))
    assert error_db(x, q.dequantize()) >= fmt.cast_db
    shapes = {"tensor": (1,), "row": (256, 1), "group": (256, 3), "block": (2, 3)}
    assert q.scale.shape == shapes[grain] and q.scale.dtype is torch.float32
    assert q.format is fmt and q.nbytes == x.numel() + 4 * q.scale.numel()
    assert q.dequantize(torch.bfloat16).dtype is torch.bfloat16


def test_zero_rows_stay_zero_and_disturb_no_others():
    x = torch.randn(32, 64)
    x[[5, 31]] = 0.0
    for grain in GRAINS:
        q = quantize(x, Cast(granularity=grain))
        assert not q.dequantize()[[5, 31]].any() and q.dequantize().isfinite().all()
    others = [i for i in range(32) if i not in (5, 31)]
    row = Cast(granularity="row")
    assert same(quantize(x, row).codes[others], quantize(x[others], row).codes)


def test_layouts_do_not_matter():
    base = torch.randn(24, 40)
    for x in (base.t(), base[::2, 3:20], base[:1].expand(9, 40), torch.tensor(2.5).expand(4, 5)):
        for grain in GRAINS:
            got, want = (quantize(t, Cast(granularity=grain)) for t in (x, x.contiguous()))
            assert same(got.codes, want.codes) and same(got.scale, want.scale)


def test_arguments():
    x = torch.randn(8, 32, requires_grad=True)
    top = amax(x)
    assert not top.requires_grad and not quantize(x, Cast()).codes.requires_grad
    assert same(quantize(x, Cast(), amax=top).codes, quantize(x, Cast()).codes)
    record = torch.zeros(1)
    q = quantize(x, Cast(), scale=torch.tensor([0.25]), amax_out=record)
    assert q.scale.item() == 0.25 and same(record, top)
    with pytest.raises(ValueError, match="dimensions"):
        quantize(torch.zeros(2, 3, 4), Cast())
    with pytest.raises(ValueError, match="one amax"):
        quantize(x, Cast(granularity="row"), amax=top)
    with pytest.raises(ValueError, match="two scales"):
        quantize_both(x, Cast(granularity="row"), scale=torch.ones(8, 1))


@pytest.mark.parametrize("shape", ((0, 5), (5, 0), (0, 0)), ids=str)
def test_empty(shape, device):
    for grain in GRAINS:
        rows, cols = quantize_both(torch.zeros(shape), Cast(granularity=grain))
        assert rows.dequantize().shape == shape and cols.dequantize().shape == shape[::-1]
        got = run(C.triton_quantize, torch.zeros(shape, device=device), E4M3, grain, both=True)
        assert [t.shape for t in got[:2]] == [rows.codes.shape, rows.scale.shape]
    codes, scale = quantize_int8(torch.zeros(shape))
    assert dequantize_int8(codes, scale).shape == shape


def test_operators_obey_their_schema_and_fakes():
    x = torch.randn(5, 140)
    ops = torch.ops.ottava
    tests = ("test_schema", "test_faketensor")
    for grain in GRAINS:
        settings = ("e4m3", grain, False, 0, False, 0, True)
        noting = (x, None, None, torch.zeros(1), *settings)
        torch.library.opcheck(ops.quantize.default, (x, None, None, *settings), test_utils=tests)
        torch.library.opcheck(ops.quantize_noting.default, noting, test_utils=tests)
    q = quantize(x, Cast())
    for op, args in (
        (ops.amax, (x,)),
        (ops.scale_from_amax, (x.abs(), "e4m3", True, 0)),
        (ops.transpose_codes, (q.codes.view(torch.uint8),)),
        (ops.quantize_int8, (x, 128)),
        (ops.dequantize_int8, (*quantize_int8(x), 128, torch.bfloat16)),
    ):
        torch.library.opcheck(op.default, args, test_utils=tests)
    # opcheck's schema test multiplies its arguments, which torch cannot do to float8.
    args = (q.codes, q.scale, "tensor", torch.bfloat16)
    torch.library.opcheck(ops.dequantize.default, args, test_utils="test_faketensor")


# ---- int8 storage ----


def test_int8_error_and_bounds():
    x = torch.randn(64, 1024)
    codes, scale = quantize_int8(x)
    assert codes.dtype is torch.int8 and scale.dtype is torch.bfloat16 and scale.shape == (64, 8)
    assert error_db(x, dequantize_int8(codes, scale, dtype=torch.float32)) >= INT8_CAST_DB
    step = scale.float().repeat_interleave(128, 1)
    assert ((dequantize_int8(codes, scale, dtype=torch.float32) - x).abs() <= step * 0.5001).all()
    assert codes.min() >= -127


def test_int8_zero_tiny_and_non_finite_groups():
    x = torch.randn(4, 256)
    x[0], x[1], x[2, 7], x[3, 200] = 0.0, 1e-42, torch.inf, torch.nan
    back = dequantize_int8(*quantize_int8(x), dtype=torch.float32)
    assert not back[0].any() and back[1].isfinite().all()
    assert back[2, :128].isnan().all() and back[2, 128:].isfinite().all()
    assert back[3, 128:].isnan().all() and back[3, :128].isfinite().all()


@pytest.mark.parametrize("group", (128, 24))
def test_int8_triton_equals_reference(group, device):
    for shape in SHAPES:
        x = torch.randn(shape)
        want = I8.ref_quantize_int8(x, group)
        got = I8.triton_quantize_int8(x.to(device), group)
        assert all(map(same, got, want))
        assert same(
            I8.triton_dequantize_int8(*got, group, torch.float32),
            I8.ref_dequantize_int8(*want, group, torch.float32),
        )
    x = torch.randn(40, 6, dtype=torch.bfloat16).t()
    got = I8.triton_quantize_int8(x.to(device), group)
    assert all(map(same, got, I8.ref_quantize_int8(x, group)))


def test_quantized_is_plain_data():
    q = quantize(torch.randn(4, 4), Cast())
    assert same(Quantized(q.codes, q.scale, "tensor").dequantize(), q.dequantize())


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ottava.kernels import cast, int8, scale

def compile(kernel, target, warps, **constants):
    constants.setdefault("stride_k", 1)
    types, values, attributes = {}, {}, {}
    kinds = {"x": "*bf16", "codes": "*u8", "codes_t": "*u8", "out": "*i32", "scale": "*fp32"}
    numbers = ("M", "K", "n", "stride_m", "stride_k", "key")
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], values[(i,)] = "constexpr", constants[name]
        else:
            types[name] = "i32" if name in numbers else kinds.get(name, "*fp32")
            if name != "key":
                attributes[(i,)] = [["tt.divisibility", 16]]
    if kernel is int8._int8_kernel:
        types |= {"codes": "*i8", "scale": "*bf16"}
    if kernel is cast._cast_kernel:
        types |= {n: "*i32" for n in ("amax", "amax_cols", "amax_out") if types[n] != "constexpr"}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    ptx = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
    assert "v4" in ptx, f"{kernel.__name__}: no 16-byte access"
    return ptx

h100, a100 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
plain = dict(POW2=False, MARGIN=0, given=None, amax_out=None, BK=128)
ptx = compile(cast._cast_kernel, h100, 4, GRAIN="tensor", E4M3=True, STOCHASTIC=False,
              HARDWARE=True, BOTH=True, BM=64, **plain)
# 64 x 128 values on 128 threads, two a conversion: each is encoded once for both orders.
assert ptx.count("cvt.rn.satfinite.e4m3x2") == 32
compile(cast._cast_kernel, a100, 8, GRAIN="group", E4M3=False, STOCHASTIC=True,
        HARDWARE=False, BOTH=True, BM=128, **plain)
compile(cast._cast_rows_kernel, h100, 4, E4M3=False, POW2=True, MARGIN=1, STOCHASTIC=False,
        HARDWARE=True, BK=2048)
compile(scale._amax_kernel, h100, 4, BLOCK=4096, STEPS=8)
compile(int8._int8_kernel, h100, 4, GROUP=128, BM=32, BK=128)
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
