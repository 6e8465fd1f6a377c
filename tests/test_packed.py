"""The assembly that AdamW runs on Hopper against the reference: all codes, all residuals, all codes of
v and m, every kind of number, all random bits."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import ptx

from ottava.kernels import moments, split
from ottava.kernels.adamw import ref_draw_w

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in")


def registers(x: np.ndarray) -> list[np.ndarray]:
    """Four neighbours a lane: [4 n] values of 4 bytes, 2 or 1 as 4, 2 or 1 registers of [n]."""
    if x.itemsize == 4:
        return list(np.ascontiguousarray(x.reshape(-1, 4).T))
    words = np.ascontiguousarray(x).view(np.uint32)
    return list(np.ascontiguousarray(words.reshape(len(x) // 4, -1).T))


def unpacked(registers: list[np.ndarray], dtype) -> torch.Tensor:
    return torch.from_numpy(np.stack(registers, 1).reshape(-1).view(dtype).copy())


def all_bits(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, count, dtype=np.uint16)


def test_decoding_the_weight_is_exact_for_every_code_and_residual():
    code, residual = np.meshgrid(
        np.arange(256, dtype=np.uint8), np.arange(-128, 128), indexing="ij"
    )
    code, residual = code.ravel(), residual.ravel().astype(np.int8)
    valid = (code & 0x7F < 0x7F) & ~((code & 0x7F == 0) & (residual < 0))
    code, residual = np.tile(code[valid], 4), np.tile(residual[valid], 4)
    order = np.random.default_rng(1).permutation(len(code))  # each in each place of a register
    code, residual = code[order], residual[order]
    text = ptx.assembly(split.decode_codes_packed)
    out = unpacked(ptx.run(text, 4, *registers(code), *registers(residual)), np.float32)
    out = torch.where(out.abs() > 1.5 * 2.0**-138, out, 0.0) * 2.0**120
    want = split.ref_decode_codes(torch.from_numpy(code), torch.from_numpy(residual), 8)
    assert torch.equal(out, want)


def numbers(low: int, high: int) -> np.ndarray:
    """FP32 magnitudes between two bit patterns, many and the neighbours of every code's border."""
    some = np.random.default_rng(2).integers(low, high, 1 << 20, dtype=np.int64)
    near = (np.arange(low >> 19, high >> 19)[:, None] << 19) + np.arange(-3, 4)
    x = np.concatenate([some, near.ravel().clip(low, high - 1), np.zeros(64, np.int64)])
    x = x[: len(x) // 4 * 4]
    return np.where(np.arange(len(x)) % 3 == 0, x | 0x80000000, x).astype(np.uint32)


def test_encoding_the_weight_is_the_reference():
    bits = numbers(0, 0x07E70000)  # up to 460 (a weight is at most 448.3 scales), times 2**-120
    bits[:8] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFC00001, 0, 1 << 31, 0x07E6FFFF]
    random = all_bits(len(bits))
    random[:8] = [0, 0xFFFF, 0x8000, 0x7FFF, 0x80, 0x7F, 0x80, 0x7F]
    text = ptx.assembly(split.encode_codes_packed)
    out = ptx.run(text, 6, *registers(bits.view(np.float32)), *registers(random))
    drawn = ref_draw_w(torch.from_numpy(random.astype(np.int64)), 12)
    x = torch.from_numpy(bits.view(np.float32).astype(np.float64) * 2.0**120).float()
    code, residual = split.ref_encode_codes(x, 8, drawn)
    assert torch.equal(unpacked(out[:1], np.uint8), code)
    assert torch.equal(unpacked(out[1:2], np.int8).int(), residual)
    magnitude = unpacked(out[2:], np.int32)
    finite = x.isfinite()
    assert torch.equal(
        magnitude[finite], torch.from_numpy(bits.view(np.int32))[finite] & 0x7FFFFFFF
    )
    assert (magnitude[~finite] >= 0x7F00000).all() and (~finite).sum() == 5
    assert magnitude[finite].max() < 0x7F00000


def test_encoding_m_is_the_reference():
    bits = numbers(0, 0x3FE00000)  # up to 1.75
    random = all_bits(len(bits))
    x = bits.view(np.float32)
    text = ptx.assembly(moments._pack_m)
    got = unpacked(ptx.run(text, 1, *registers(x), *registers(random)), np.uint8)
    h = torch.from_numpy(x).half().view(torch.int16).int()
    h = h + ((torch.from_numpy(random.astype(np.int32)) >> 1) & 0x7F)
    assert torch.equal(got, (((h >> 7) & 0x7F) | ((h >> 8) & 0x80)).to(torch.uint8))
    # The same through the public reference: a group with 448 has the scale 257 / 256.
    m = torch.from_numpy(x[: len(x) // 128 * 128].copy()).view(-1, 128) * 256.0
    m[:, 0] = 447.0
    codes, scale = moments.ref_encode_m(
        m, torch.from_numpy(random[: m.numel()].astype(np.int64)).view_as(m)
    )
    inputs = (m / scale.float().unsqueeze(1) / 256.0).numpy().ravel()
    got = unpacked(ptx.run(text, 1, *registers(inputs), *registers(random[: m.numel()])), np.uint8)
    assert (got.view_as(codes) != codes.view(torch.uint8)).float().mean() < 1e-4


@pytest.mark.parametrize("binades", [1.0, 8.0, 60.0])
def test_encoding_v_is_the_reference(binades):
    v = torch.exp2(-binades * torch.rand(4096, 128) - 20)
    v[::7, 3], v[5, :], v[6, 9] = 0.0, 0.0, 2.0**-130
    v[:, 0], v[:, 1] = 2.0**-20, 2.0 ** (-20 - binades)
    random = all_bits(v.numel())
    codes, ends = moments.ref_encode_v(v, torch.from_numpy(random.astype(np.int64)).view_as(v))
    lo, hi = ends[:, :1].float(), ends[:, 1:].float()
    per_code = 32512.0 / (hi - lo)
    curve = (hi - lo) * (0.6931471805599453 / 2.0 / 32512.0)
    z = torch.log2(torch.where(v < 2.0**-126, 0.0, v)) * per_code
    z = z + (256.0 + 2.0 * curve - lo / 128.0 * per_code)
    rows = [t.expand_as(v).numpy().ravel() for t in (0.25 * curve, 0.5 - 1.5 * curve)]
    inputs = (
        *registers(z.numpy().ravel()),
        *registers(rows[0]),
        *registers(random),
        *registers(rows[1]),
    )
    got = unpacked(ptx.run(ptx.assembly(moments._pack_v), 1, *inputs), np.uint8).view_as(codes)
    # z is rounded to 2**-15 of a code: that often another code, and never a code further.
    assert ((got.int() - codes.int()).abs() <= 1).all() and (got != codes).float().mean() < 2**-11
    assert torch.equal(got == 0, v < 2.0**-126) and torch.equal(codes == 0, v < 2.0**-126)


def test_decoding_v_is_exact_for_every_code():
    codes = np.arange(256, dtype=np.uint8)
    for shift in range(4):
        here = np.roll(codes, shift)
        text = ptx.assembly(moments._spread_v)
        out = unpacked(ptx.run(text, 4, *registers(here)), np.float32)
        want = torch.from_numpy(np.where(here == 0, -65504.0, here).astype(np.float32))
        assert torch.equal(out, want)
