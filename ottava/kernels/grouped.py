"""Products over the experts of a MoE layer: rows in expert order, groups of any size, also none.

Expert e owns rows ends[e-1] .. ends[e]. No scale is shared by two experts: row codes have a scale
per row, a weight's belong to its expert, and `grouped_cols` gives each expert's rows one scale of
their own. Its input is e4m3 with power-of-two scales per row, so that bringing a row to its
expert's scale only shifts exponents: exact, but for codes that become subnormal.

The product along the tokens (`grouped_grad_weight`) wants both operands with the tokens innermost
and their number a multiple of 16: each expert's columns are laid out as [K, m16], m16 its row count
rounded up, one expert after another, the padding zero.

P rows in expert order, T tokens, k rows a token, E experts, K inner and N outer features.
"""

from __future__ import annotations

import torch

from ..numerics.recipe import Cast
from .cast import Quantized, quantize
from .codes import converts_fp8, decode, encode, ref_encode
from .gemm import gemm, has_fp8_unit, ref_gemm
from .op import operator, tl, triton

PAD = 16  # an FP8 unit takes inner sizes in multiples of this


def _slices(ends: torch.Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]


def padded_starts(ends_E: torch.Tensor) -> torch.Tensor:
    """Where each expert's columns begin, in columns: int32 [E]."""
    size = ends_E.diff(prepend=ends_E.new_zeros(1))
    padded = (size + (PAD - 1)) // PAD * PAD
    return (padded.cumsum(0) - padded).to(torch.int32)


def cols_of_expert(
    cols: torch.Tensor, features: int, starts: list[int], expert: int, rows: int
) -> torch.Tensor:
    """View [features, m16] of one expert's columns in what `grouped_cols` made."""
    width = -(-rows // PAD) * PAD
    begin = features * starts[expert]
    return cols[begin : begin + features * width].view(features, width)


# ---- references: the specification, and the CPU path ----


def ref_grouped_gemm(a, a_scale, a_grain, b, b_scale, b_grain, ends, out_dtype, fast_accum):
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    for e, rows in enumerate(_slices(ends)):
        scale = b_scale[e][:, None] if b_grain == "row" else b_scale[e]
        out[rows] = ref_gemm(
            a[rows], a_scale[rows], a_grain, b[e], scale, b_grain, None, out_dtype, fast_accum
        )
    return out


def ref_grouped_cols(codes, scale, index, ends, expert_scale):
    features, slices = codes.shape[1], _slices(ends)
    starts = padded_starts(ends).tolist()
    total = slices[-1].stop
    out = torch.zeros(
        features * (total + PAD * len(slices)), dtype=torch.uint8, device=codes.device
    )
    for e, rows in enumerate(slices):
        size = rows.stop - rows.start
        source = index[rows].long() if index is not None else torch.arange(rows.start, rows.stop)
        value = codes.view(torch.uint8)[source].view(codes.dtype).float()
        shifted = ref_encode(value * (scale[source] / expert_scale[e]), "e4m3").view(torch.uint8)
        cols_of_expert(out, features, starts, e, size)[:, :size] = shifted.t()
    return out.view(torch.float8_e4m3fn)


def _each_expert(a, b, host_ends, rows_a, rows_b):
    """(expert, its columns of a [N, m16], of b [K, m16]), and no columns where it has no rows."""
    starts = padded_starts(host_ends).tolist()
    for e, rows in enumerate(_slices(host_ends)):
        size = rows.stop - rows.start
        if size:
            yield (
                e,
                cols_of_expert(a, rows_a, starts, e, size),
                cols_of_expert(b, rows_b, starts, e, size),
            )
        else:
            yield e, None, None


def ref_grouped_grad_weight(
    a, a_scale, b, b_scale, ends, host_ends, rows_a, rows_b, out_dtype, fast_accum
):
    out = torch.zeros(ends.shape[0], rows_a, rows_b, dtype=out_dtype, device=a.device)
    for e, left, right in _each_expert(a, b, host_ends, rows_a, rows_b):
        if left is not None:
            product = left.float() @ right.float().t()
            out[e] = (product * a_scale[e] * b_scale[e]).to(out_dtype)
    return out


def ref_sum_rows(y, position):
    tokens, per_token = position.shape
    rows = y[position.flatten().long()].view(tokens, per_token, y.shape[1])
    return rows.float().sum(1).to(y.dtype)


def ref_grouped_matmul(a, b, ends):
    out = a.new_empty(a.shape[0], b.shape[1])
    for e, rows in enumerate(_slices(ends)):
        out[rows] = a[rows] @ b[e].t()
    return out


def ref_grouped_outer(a, b, ends):
    return torch.stack([a[rows].t() @ b[rows] for rows in _slices(ends)])


# ---- Triton ----


@triton.jit
def _grouped_cols_kernel(
    codes, scale, index, tile_ends, ends, starts, expert_scale, out, K, E,
    E_PADDED: tl.constexpr, HARDWARE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of BM rows of one expert: gather, shift to the expert's scale, write transposed."""
    tile, pid_k = tl.program_id(0), tl.program_id(1)
    experts = tl.arange(0, E_PADDED)
    stops = tl.load(tile_ends + experts, mask=experts < E, other=0x7FFFFFFF)
    e = tl.sum((stops <= tile).to(tl.int32), 0)
    if e < E:
        first = tl.load(tile_ends + e - 1, mask=e > 0, other=0)
        begin = tl.load(ends + e - 1, mask=e > 0, other=0)
        size = tl.load(ends + e) - begin
        width = (size + 15) // 16 * 16
        i = (tile - first) * BM + tl.arange(0, BM)
        k = pid_k * BK + tl.arange(0, BK)
        inside = i < size
        row = begin + i
        if index is not None:
            row = tl.load(index + row, mask=inside, other=0)
        shift = tl.load(scale + row, mask=inside, other=1.0)
        shift = tl.div_rn(shift, tl.load(expert_scale + e) + tl.zeros([BM], tl.float32))
        here = codes + row.to(tl.int64)[:, None] * K + k[None, :]
        c = tl.load(here, mask=inside[:, None] & (k < K)[None, :], other=0)
        v = decode(c, True, HARDWARE) * shift[:, None]
        c = encode(v, True, HARDWARE)
        target = out + tl.load(starts + e).to(tl.int64) * K
        target += k.to(tl.int64)[:, None] * width + i[None, :]
        tl.store(target, tl.trans(c), mask=(k < K)[:, None] & (i < width)[None, :])


@triton.jit
def _sum_rows_kernel(y, position, out, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        row = tl.load(position + token * TOP_K + j).to(tl.int64)
        total += tl.load(y + row * H + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=inside)


def grouped_block_grad_weight_loop(
    grad, x, host_ends, grad_format, x_format, out_dtype, fast_accum
):
    """Reference and CUDA path alike: each expert's columns cast per 1 x 128 group of its tokens."""
    shape = host_ends.shape[0], grad.shape[1], x.shape[1]
    out = torch.zeros(shape, dtype=out_dtype, device=grad.device)
    for e, rows in enumerate(_slices(host_ends)):
        if rows.stop > rows.start:
            pair = (
                quantize(t[rows].t(), Cast(format=f, granularity="group", scale_kind="pow2"))
                for t, f in ((grad, grad_format), (x, x_format))
            )
            out[e] = gemm(*pair, out_dtype=out_dtype, fast_accum=fast_accum)
    return out


# ---- CUDA wrappers: same arguments and results as the references ----

_TILE_ROWS = 64


def triton_grouped_cols(codes, scale, index, ends, expert_scale):
    rows = codes.shape[0] if index is None else index.shape[0]
    features, experts, device = codes.shape[1], ends.shape[0], codes.device
    out = torch.empty(features * (rows + PAD * experts), dtype=torch.uint8, device=device)
    size = ends.diff(prepend=ends.new_zeros(1))
    tile_ends = ((size + (_TILE_ROWS - 1)) // _TILE_ROWS).cumsum(0).to(torch.int32)
    grid = (triton.cdiv(rows, _TILE_ROWS) + experts, triton.cdiv(features, 128))
    if rows and features:
        _grouped_cols_kernel[grid](
            codes.view(torch.uint8), scale, index, tile_ends, ends, padded_starts(ends),
            expert_scale, out, features, experts, E_PADDED=triton.next_power_of_2(experts),
            HARDWARE=converts_fp8(device), BM=_TILE_ROWS, BK=128,
        )  # fmt: skip
    return out.view(torch.float8_e4m3fn)


def triton_sum_rows(y, position):
    (tokens, per_token), width = position.shape, y.shape[1]
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        grid = (tokens, triton.cdiv(width, block))
        _sum_rows_kernel[grid](y, position, out, width, TOP_K=per_token, BLOCK=block)
    return out


def cuda_grouped_gemm(a, a_scale, a_grain, b, b_scale, b_grain, ends, out_dtype, fast_accum):
    """One launch for row scales on an FP8 unit; else an FP8 GEMM an expert, at the price of a wait
    for the group sizes."""
    aligned = a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0 and a.shape[0] > 0
    e4m3 = a.dtype == b.dtype == torch.float8_e4m3fn
    if a_grain == b_grain == "row" and aligned and e4m3 and out_dtype == torch.bfloat16:
        major, _ = torch.cuda.get_device_capability(a.device)
        if major == 9:
            return torch._scaled_grouped_mm(
                a, b.transpose(1, 2), a_scale.reshape(-1), b_scale.contiguous(), offs=ends,
                out_dtype=out_dtype, use_fast_accum=fast_accum,
            )  # fmt: skip
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    for e, rows in enumerate(_slices(ends)):
        if rows.stop > rows.start:
            scale = b_scale[e][:, None] if b_grain == "row" else b_scale[e]
            left, right = (
                Quantized(a[rows], a_scale[rows], a_grain),
                Quantized(b[e], scale, b_grain),
            )
            out[rows] = gemm(left, right, out_dtype=out_dtype, fast_accum=fast_accum)
    return out


def cuda_grouped_grad_weight(
    a, a_scale, b, b_scale, ends, host_ends, rows_a, rows_b, out_dtype, fast_accum
):
    """A per-tensor FP8 GEMM an expert, straight into its slice of the gradient."""
    out = torch.empty(ends.shape[0], rows_a, rows_b, dtype=out_dtype, device=a.device)
    direct = has_fp8_unit(a.device) and rows_a % 16 == 0 and rows_b % 16 == 0
    # cuBLASLt reads a scale through a pointer that must be 16-byte aligned: one scale in four.
    a_scale, b_scale = (torch.nn.functional.pad(s.view(-1, 1), (0, 3)) for s in (a_scale, b_scale))
    for e, left, right in _each_expert(a, b, host_ends, rows_a, rows_b):
        if left is None:
            out[e].zero_()
        elif direct:
            fp8_matmul_into(out[e], left, a_scale[e, :1], right, b_scale[e, :1], fast_accum)
        else:
            pair = (
                Quantized(left, a_scale[e, :1], "tensor"),
                Quantized(right, b_scale[e, :1], "tensor"),
            )
            out[e] = gemm(*pair, out_dtype=out_dtype, fast_accum=fast_accum)
    return out


def fp8_matmul_into(out, a, a_scale, b, b_scale, fast_accum) -> None:
    """out[N, K] = a[N, M] @ b[K, M]^T under one scale each, without a temporary."""
    torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=out.dtype,
        use_fast_accum=fast_accum, out=out,
    )  # fmt: skip


def cuda_grouped_matmul(a, b, ends):
    if a.dtype == torch.bfloat16:
        return torch.nn.functional.grouped_mm(a, b.transpose(1, 2), offs=ends)
    return ref_grouped_matmul(a, b, ends)


def cuda_grouped_outer(a, b, ends):
    if a.dtype != torch.bfloat16:
        return ref_grouped_outer(a, b, ends)
    out = torch.nn.functional.grouped_mm(a.t(), b, offs=ends)
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return out.masked_fill_(empty[:, None, None], 0.0)


# ---- operators ----

_grouped_gemm = operator(
    "grouped_gemm(Tensor a, Tensor a_scale, str a_grain, Tensor b, Tensor b_scale, str b_grain, "
    "Tensor ends, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=ref_grouped_gemm,
    fake=lambda a, a_scale, a_grain, b, b_scale, b_grain, ends, out_dtype, fast_accum: a.new_empty(
        a.shape[0], b.shape[1], dtype=out_dtype
    ),
    cuda=cuda_grouped_gemm,
    counted=True,
)
_grouped_cols = operator(
    "grouped_cols(Tensor codes, Tensor scale, Tensor? index, Tensor ends, Tensor expert_scale) "
    "-> Tensor",
    reference=ref_grouped_cols,
    fake=lambda codes, scale, index, ends, expert_scale: codes.new_empty(
        codes.shape[1] * ((codes if index is None else index).shape[0] + PAD * ends.shape[0])
    ),
    cuda=triton_grouped_cols,
)
_grouped_grad_weight = operator(
    "grouped_grad_weight(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor ends, "
    "Tensor host_ends, int rows_a, int rows_b, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=ref_grouped_grad_weight,
    fake=lambda a, a_scale, b, b_scale, ends, host, rows_a, rows_b, out_dtype, fast: a.new_empty(
        ends.shape[0], rows_a, rows_b, dtype=out_dtype
    ),
    cuda=cuda_grouped_grad_weight,
)
_grouped_block_grad_weight = operator(
    "grouped_block_grad_weight(Tensor grad, Tensor x, Tensor host_ends, str grad_format, "
    "str x_format, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=grouped_block_grad_weight_loop,
    fake=lambda grad, x, host_ends, grad_format, x_format, out_dtype, fast_accum: grad.new_empty(
        host_ends.shape[0], grad.shape[1], x.shape[1], dtype=out_dtype
    ),
)
_sum_rows = operator(
    "sum_rows(Tensor y, Tensor position) -> Tensor",
    reference=ref_sum_rows,
    fake=lambda y, position: y.new_empty(position.shape[0], y.shape[1]),
    cuda=triton_sum_rows,
)
_grouped_matmul = operator(
    "grouped_matmul(Tensor a, Tensor b, Tensor ends) -> Tensor",
    reference=ref_grouped_matmul,
    fake=lambda a, b, ends: a.new_empty(a.shape[0], b.shape[1]),
    cuda=cuda_grouped_matmul,
)
_grouped_outer = operator(
    "grouped_outer(Tensor a, Tensor b, Tensor ends) -> Tensor",
    reference=ref_grouped_outer,
    fake=lambda a, b, ends: a.new_empty(ends.shape[0], a.shape[1], b.shape[1]),
    cuda=cuda_grouped_outer,
)


# ---- public ----


def grouped_gemm(
    a: Quantized, b: Quantized, ends: torch.Tensor, *, out_dtype, fast_accum: bool = False
) -> torch.Tensor:
    """Each row of a_PK times its expert's b_ENK^T, as [P, N] in `out_dtype`.

    ends: int32 [E] on the device. Granularities: "row" x "row" (b.scale [E, N]) or "group" x
    "block" (b.scale [E, n, k]). ValueError for e5m2 x e5m2 and for unequal K.
    """
    if a.codes.dtype is b.codes.dtype is torch.float8_e5m2:
        raise ValueError("grouped_gemm: e5m2 x e5m2 is refused by FP8 matrix units")
    if a.codes.shape[1] != b.codes.shape[2]:
        raise ValueError(
            f"grouped_gemm: K differs: {tuple(a.codes.shape)} @ {tuple(b.codes.shape)}^T"
        )
    return _grouped_gemm(
        a.codes, a.scale, a.granularity, b.codes, b.scale, b.granularity, ends, out_dtype,
        fast_accum,
    )  # fmt: skip


def grouped_cols(
    a: Quantized, ends: torch.Tensor, expert_scale: torch.Tensor, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Each expert's rows of `a` as columns under its one scale: e4m3, laid out as told above.

    a: e4m3, "row", power-of-two scales, none above its expert's (FP32 [E]). index: int32 [P], the
    row of `a` that is row p in expert order; None where a's rows are in that order.
    """
    if a.codes.dtype is not torch.float8_e4m3fn or a.granularity != "row":
        raise ValueError(f"grouped_cols: wants e4m3 codes with row scales, not {a.granularity}")
    return _grouped_cols(a.codes, a.scale, index, ends, expert_scale)


def grouped_grad_weight(
    a_cols, a_scale, b_cols, b_scale, ends, host_ends, *, shape, out_dtype, fast_accum=False
) -> torch.Tensor:
    """a^T b over each expert's rows, [E, *shape] in `out_dtype`; exactly zero for no rows.

    a_cols, b_cols: from `grouped_cols`, of features shape = (N, K); scales FP32 [E]. host_ends:
    `ends` on the host, where it must have arrived.
    """
    return _grouped_grad_weight(
        a_cols, a_scale, b_cols, b_scale, ends, host_ends, *shape, out_dtype, fast_accum
    )


def grouped_block_grad_weight(
    grad, x, host_ends, *, grad_format, x_format, out_dtype, fast_accum=False
) -> torch.Tensor:
    """grad_PN^T x_PK over each expert's rows, [E, N, K], cast per 1 x 128 group of its tokens."""
    return _grouped_block_grad_weight(
        grad, x, host_ends, grad_format, x_format, out_dtype, fast_accum
    )


def sum_rows(y_PH: torch.Tensor, position_Tk: torch.Tensor) -> torch.Tensor:
    """out_TH[t] = sum over j of y[position[t, j]], added in FP32 in the order of j."""
    return _sum_rows(y_PH, position_Tk)


def grouped_matmul(a_PK: torch.Tensor, b_ENK: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row of a times its expert's b^T, [P, N], in high precision (one dtype)."""
    return _grouped_matmul(a_PK, b_ENK, ends)


def grouped_outer(a_PN: torch.Tensor, b_PK: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """a^T b over each expert's rows, [E, N, K], in high precision; exactly zero for no rows."""
    return _grouped_outer(a_PN, b_PK, ends)
