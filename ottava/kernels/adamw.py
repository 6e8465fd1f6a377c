"""One AdamW update of one parameter: every master and every kind of moments, one kernel.

    m = beta1 m + (1 - beta1) g        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    v = beta2 v + (1 - beta2) g^2      w = w - lr (u + weight_decay w)

in FP32 from whatever is stored, and stored again as it was. Master `param`: FP32; BF16 (stochastic
rounding); codes + residual + scale, or BF16 + residual (see split.py). Moments: FP32; BF16
(stochastic rounding); 8-bit (moments.py: groups of 128 that do not cross a leading index of an
expert weight). With inexact moments |u| is held below the bound that exact moments obey anyway
(Cauchy-Schwarz): rounding m up where v is tiny cannot throw a weight away.

Codes: the scale is chosen before the update, from the master's amax plus the most the update can
add (lr * bound), so nothing clips; the new amax is gathered in the same pass, and the program that
finishes last writes scale and amax. lr = 0 leaves every weight bit as it was.
Where found_inf > 0 nothing changes; `skipped`, if given, counts that, and the bias is corrected for
step - skipped. A `clock` (clock.py) stands for lr, step and key: then `key` is only the stream.
Random bits of an element (`ref_draw`): 0-9 for v, 10-19 for m, the top ones for w.
"""

from __future__ import annotations

import math

import torch

from .clock import as_fp32, corrections, read_clock, ref_read_clock
from .codes import magnitude_bits, ref_scale_from_amax, scale_of
from .moments import (
    GROUP,
    decode_m,
    decode_v,
    encode_m,
    encode_v,
    fast_inverse,
    fast_sqrt,
    from_bf16,
    leads_of,
    ref_decode_m,
    ref_decode_v,
    ref_encode_m,
    ref_encode_v,
    ref_round_bf16,
    round_bf16,
)
from .op import INTERPRETED, operator, tl, triton
from .random import random_bits, ref_random_bits
from .split import (
    SLACK,
    amax_of_magnitude,
    decode_bf16,
    decode_codes,
    encode_bf16,
    encode_codes,
    pack_split,
    ref_unpack_split,
)

_W_KEY = 0x55555555  # BF16 moments use up the first 32 bits; w then draws under another key
_MAX_BOUND = 64.0
LEAST_EPS = 1e-30  # so that a parameter that never had a gradient gives 0 / eps, not NaN


def update_bound(beta1: float, beta2: float) -> float:
    """The most |u| can be, at any step, whatever the gradients (eps aside)."""
    ratio = beta1 * beta1 / beta2 if beta2 > 0.0 else math.inf
    if ratio >= 1.0 or beta2 >= 1.0:
        return _MAX_BOUND
    limit = (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - ratio))
    return min(max(1.0, limit) * 1.001, _MAX_BOUND)


# ---- reference: the specification, and the CPU path ----


def _grouped(t: torch.Tensor, leads: int) -> torch.Tensor:
    """[leads * ceil(size / 128), 128], zero-padded."""
    t = t.reshape(leads, -1)
    return torch.nn.functional.pad(t, (0, -t.shape[1] % GROUP)).view(-1, GROUP)


def _ungrouped(t: torch.Tensor, shape: torch.Size, leads: int) -> torch.Tensor:
    size = shape.numel() // leads
    return t.view(leads, -1)[:, :size].reshape(shape)


def ref_draw(shape: torch.Size, leads: int, key: int, device: torch.device) -> torch.Tensor:
    """32 random bits an element (int64). Two neighbours share a hash: the second one's bits are
    the first one's, mixed once more. (Half the work, of which this kernel has too much.)"""
    size = shape.numel() // leads
    index = torch.arange(leads, device=device).unsqueeze(1) * size
    index = index + torch.arange(-(-size // 2), device=device)
    first = ref_random_bits(index, key)
    second = (first * 0x9E3779B1) & 0xFFFFFFFF
    both = torch.stack([first, second ^ (second >> 16)], 2)
    return both.view(leads, -1)[:, :size].reshape(shape)


def _ref_moments(m, v, m_scale, v_range, g, beta1, beta2, leads, bits):
    """Update m and v in place; returns their FP32 values before they are rounded."""
    if m_scale is None:
        new_m = m.float() * beta1 + g * (1.0 - beta1)
        new_v = v.float() * beta2 + (g * g) * (1.0 - beta2)
        if m.dtype == torch.float32:
            m.copy_(new_m), v.copy_(new_v)
        else:
            m.copy_(ref_round_bf16(new_m, bits & 0xFFFF))
            v.copy_(ref_round_bf16(new_v, bits >> 16))
        return new_m, new_v
    g, bits = _grouped(g, leads), _grouped(bits, leads)
    codes = _grouped(m.view(torch.uint8), leads).view(torch.float8_e4m3fn)
    new_m = ref_decode_m(codes, m_scale) * beta1 + g * (1.0 - beta1)
    new_v = ref_decode_v(_grouped(v, leads), v_range) * beta2 + (g * g) * (1.0 - beta2)
    m_codes, scale = ref_encode_m(new_m, (bits >> 10) & 0x3FF)
    v_codes, ends = ref_encode_v(new_v, bits & 0x3FF)
    m.copy_(_ungrouped(m_codes, m.shape, leads))
    v.copy_(_ungrouped(v_codes, v.shape, leads))
    m_scale.copy_(scale), v_range.copy_(ends)
    return _ungrouped(new_m, m.shape, leads), _ungrouped(new_v, v.shape, leads)


def ref_next_scale(
    scale: torch.Tensor, amax: torch.Tensor, reach: float, margin: int
) -> torch.Tensor:
    """The scale that holds every weight after an update that moves none by more than `reach`."""
    if reach == 0.0:
        return scale.flatten()
    return ref_scale_from_amax((amax + reach) * SLACK, "e4m3", True, margin)


def ref_adamw_step(
    param, residual, scale, amax, work, grad, m, v, m_scale, v_range, low,
    lr_tensor, grad_mul, found_inf, skipped,
    lr, beta1, beta2, eps, weight_decay, margin, step, key, clock=None,
):  # fmt: skip
    correct = None
    if clock is not None:
        lr, *correct, step, key = ref_read_clock(clock, key)
    if found_inf is not None:
        if bool(found_inf > 0):
            if skipped is not None:
                skipped.add_(1)
            return
        if skipped is not None:
            step, correct = step - int(skipped), None
    lr = as_fp32(lr) if lr_tensor is None else float(lr_tensor)
    leads, _ = leads_of(param)
    if grad.numel() == 0:
        return
    exact = m.dtype == torch.float32
    eps = max(eps, LEAST_EPS)
    rounds = not exact or residual is not None or param.dtype != torch.float32
    bits = ref_draw(grad.shape, leads, key, grad.device) if rounds else None

    g = grad.float() if grad_mul is None else grad.float() * grad_mul
    new_m, new_v = _ref_moments(m, v, m_scale, v_range, g, beta1, beta2, leads, bits)
    correct1, correct2 = correct or corrections(beta1, beta2, step)
    u = (new_m * correct1) / (new_v.sqrt() * correct2 + eps)
    bound = update_bound(beta1, beta2)
    if not exact or scale is not None:
        u = u.clamp(-bound, bound)
    w = param.float() if residual is None else ref_unpack_split(param, residual, scale)
    if scale is not None:  # a master that holds a NaN becomes NaN as a whole
        w = torch.where(amax.view(scale.shape) < torch.inf, w, torch.nan)
    w = w - lr * u - (lr * weight_decay) * w

    if m.dtype == torch.bfloat16 and rounds:
        bits = ref_draw(grad.shape, leads, key ^ _W_KEY, grad.device)
    if residual is not None:
        if lr == 0.0:
            return
        width = 8 * residual.element_size()
        drop = (20 if scale is not None else 16) - width
        random = (bits >> (32 - drop)).to(torch.int32) if drop else None
        if scale is not None:
            scale.copy_(ref_next_scale(scale, amax, lr * bound, margin).view(scale.shape))
            amax.copy_(w.reshape(leads, -1).abs().amax(1))
        split = pack_split(w, scale, width, random)
        param.copy_(split.codes), residual.copy_(split.residual)
    elif param.dtype == torch.bfloat16:
        param.copy_(ref_round_bf16(w, bits >> 16))
    else:
        param.copy_(w)
        if low is not None:
            low.copy_(w)


# ---- Triton ----


@triton.jit
def _draw(start, tile, key, TILE: tl.constexpr):
    """uint32 [TILE, 128] for groups tile * TILE on of a lead; twin of `ref_draw`."""
    pairs = tl.arange(0, TILE)[:, None] * 64 + tl.arange(0, 64)[None, :]
    first = random_bits(start.to(tl.uint32) + (tile * (TILE * 64) + pairs).to(tl.uint32), key)
    second = first * 0x9E3779B1
    return tl.join(first, second ^ (second >> 16)).reshape([TILE, 128])


@triton.jit
def _inverse_correction(log_beta, t):
    """1 / (1 - beta**t) for log_beta = ln(beta); a series where 1 - exp(x) would cancel."""
    x = log_beta * t
    series = 1.0 + x * (1 / 6.0) * (1.0 + x * (1 / 7.0) * (1.0 + x * (1 / 8.0)))
    series = 1.0 + x * 0.5 * (1.0 + x * (1 / 3.0) * (1.0 + x * 0.25 * (1.0 + x * 0.2 * series)))
    return 1.0 / tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _next_scale(scale, amax, reach, MARGIN: tl.constexpr):
    needed = scale_of(magnitude_bits((amax + reach) * (1.0 - 0.00048828125)), True, True, MARGIN)
    return tl.where(reach == 0.0, scale, needed)


@triton.jit(do_not_specialize=["step", "key", "groups", "leads"])
def _adamw_kernel(
    param, residual, scale, amax, work, grad, m, v, m_scale, v_range, low,
    lr, grad_mul, found_inf, skipped, clock,
    beta1, beta2, rest1, rest2, correct1, correct2, bound, eps, weight_decay,
    step, key, n, groups, leads,
    MASTER: tl.constexpr, BITS: tl.constexpr, STATES: tl.constexpr, LOW: tl.constexpr,
    LR_TENSOR: tl.constexpr, CLOCK: tl.constexpr, MUL: tl.constexpr, GUARD: tl.constexpr,
    COUNTED: tl.constexpr, MARGIN: tl.constexpr, LEADS: tl.constexpr, TILE: tl.constexpr,
    DRAWS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """TILE groups of 128 at a time. n, groups: elements and groups per lead; grid (any, leads).

    correct1, correct2: inverse bias corrections, or with COUNTED ln(beta1), ln(beta2): then the step
    count is step - skipped, known on the device alone. With CLOCK lr, corrections, step and key are
    read from there, and the argument `key` is the parameter's stream.
    """
    if CLOCK:
        clock_rate, clock_correct1, clock_correct2, step, key = read_clock(clock, key)
    if LR_TENSOR:
        rate = tl.load(lr).to(tl.float32)
    elif CLOCK:
        rate = clock_rate
    else:
        rate = lr
    tiles = tl.cdiv(groups, TILE)
    live = 1
    if GUARD:
        live = tl.where(tl.load(found_inf) > 0, 0, 1)
        tiles = tiles * live
    if COUNTED:
        t = (step - tl.load(skipped)).to(tl.float32)
        correct1 = _inverse_correction(correct1, t)
        correct2 = tl.sqrt(_inverse_correction(correct2, t))
        if (live == 0) & (tl.program_id(0) + tl.program_id(1) == 0):
            tl.store(skipped, tl.load(skipped) + 1)
    elif CLOCK:
        correct1, correct2 = clock_correct1, clock_correct2
    decay = rate * weight_decay
    mul = tl.load(grad_mul).to(tl.float32) if MUL else 1.0
    lead = tl.program_id(1).to(tl.int64)
    start, g_start = lead * n, lead * groups
    if MASTER == "codes":
        reach = rate * bound
        old_scale, old_amax = tl.load(scale + lead), tl.load(amax + lead)
        new_scale = _next_scale(old_scale, old_amax, reach, MARGIN)
        # A master that holds a NaN (its amax says so) becomes NaN as a whole.
        ratio = tl.where(old_amax < float("inf"), old_scale / new_scale, float("nan"))
        x_rate = rate / new_scale
    top = tl.zeros([TILE], tl.int32)
    written = tl.where(rate == 0.0, 0, n)

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = tile * TILE + tl.arange(0, TILE)
        offs = rows[:, None] * 128 + tl.arange(0, 128)[None, :]
        mask, row_mask = offs < n, rows < groups
        g = tl.load(grad + start + offs, mask=mask, other=0.0).to(tl.float32)
        if MUL:
            g = g * mul
        if DRAWS:
            rnd = _draw(start, tile, key, TILE)
        old_m = tl.load(m + start + offs, mask=mask, other=0)
        old_v = tl.load(v + start + offs, mask=mask, other=0)
        if STATES == "8bit":
            ends = v_range + 2 * (g_start + rows)
            old_m = decode_m(old_m, tl.load(m_scale + g_start + rows, mask=row_mask, other=0.0))
            low_end = tl.load(ends, mask=row_mask, other=0)
            old_v = decode_v(old_v, low_end, tl.load(ends + 1, mask=row_mask, other=0), FAST)
        if STATES == "bf16":
            old_m, old_v = from_bf16(old_m), from_bf16(old_v)
        new_m = old_m * beta1 + g * rest1
        new_v = old_v * beta2 + (g * g) * rest2
        if STATES == "8bit":
            m_code, group_scale = encode_m(new_m, rnd.to(tl.int32, bitcast=True))
            v_code, lo, hi = encode_v(new_v, rnd.to(tl.int32, bitcast=True), FAST)
            tl.store(m_scale + g_start + rows, group_scale.to(tl.bfloat16), mask=row_mask)
            tl.store(ends, lo.to(tl.int16), mask=row_mask)
            tl.store(ends + 1, hi.to(tl.int16), mask=row_mask)
        elif STATES == "bf16":
            m_code = round_bf16(new_m, (rnd & 0xFFFF).to(tl.int32))
            v_code = round_bf16(new_v, (rnd >> 16).to(tl.int32))
            if MASTER != "fp32":
                rnd = _draw(start, tile, key ^ 0x55555555, TILE)
        else:
            m_code, v_code = new_m, new_v
        tl.store(m + start + offs, m_code.to(m.dtype.element_ty), mask=mask)
        tl.store(v + start + offs, v_code.to(v.dtype.element_ty), mask=mask)

        if STATES == "fp32":
            u = (new_m * correct1) / (tl.sqrt(new_v) * correct2 + eps)
        else:
            u = new_m * correct1 * fast_inverse(fast_sqrt(new_v, FAST) * correct2 + eps, FAST)
        if STATES != "fp32" or MASTER == "codes":
            u = tl.maximum(u, -bound, propagate_nan=tl.PropagateNan.ALL)
            u = tl.minimum(u, bound, propagate_nan=tl.PropagateNan.ALL)
        old = tl.load(param + start + offs, mask=mask, other=0)
        if MASTER == "codes":
            rest = tl.load(residual + start + offs, mask=mask, other=0)
            x = decode_codes(old, rest, BITS) * ratio
            x = x - x_rate * u - decay * x
            code, rest, magnitude = encode_codes(x, (rnd >> (12 + BITS)).to(tl.int32), BITS)
            top = tl.maximum(top, tl.max(magnitude, 1))
        else:
            if MASTER == "split":
                w = decode_bf16(old, tl.load(residual + start + offs, mask=mask, other=0), BITS)
            elif MASTER == "bf16":
                w = from_bf16(old)
            else:
                w = old
            w = w - rate * u - decay * w
            if MASTER == "split":
                if BITS == 8:
                    code, rest = encode_bf16(w, (rnd >> 24).to(tl.int32), BITS)
                else:
                    code, rest = encode_bf16(w, 0, BITS)
        if MASTER == "codes" or MASTER == "split":
            keep = offs < written
            tl.store(param + start + offs, code.to(param.dtype.element_ty), mask=keep)
            tl.store(residual + start + offs, rest.to(residual.dtype.element_ty), mask=keep)
        elif MASTER == "bf16":
            tl.store(param + start + offs, round_bf16(w, (rnd >> 16).to(tl.int32)), mask=mask)
        else:
            tl.store(param + start + offs, w, mask=mask)
            if LOW == "bf16":
                bits = w.to(tl.int32, bitcast=True)
                tl.store(low + start + offs, round_bf16(w, 0x7FFF + ((bits >> 16) & 1)), mask=mask)
            elif LOW == "cast":
                tl.store(low + start + offs, w.to(low.dtype.element_ty), mask=mask)

    if MASTER == "codes":
        if tl.where(rate == 0.0, 0, live) != 0:
            # Every warp has read scale and amax once this reduction over the program is done.
            largest = amax_of_magnitude(tl.max(top, 0), new_scale)
            tl.atomic_max(work + 1 + lead, magnitude_bits(largest))
            done = tl.atomic_add(work, 1)
            if done == tl.num_programs(0) * leads - 1:
                e = tl.arange(0, LEADS)
                there = e < leads
                gathered = tl.atomic_xchg(work + 1 + e, 0, mask=there)
                s = tl.load(scale + e, mask=there, other=1.0)
                a = tl.load(amax + e, mask=there, other=0.0)
                tl.store(scale + e, _next_scale(s, a, reach, MARGIN), mask=there)
                tl.store(amax + e, gathered.to(tl.float32, bitcast=True), mask=there)
                tl.store(work, 0)


_TILE = 16  # groups a program handles at a time: 2048 elements, 16 a thread
_PROGRAMS = 8 * 132  # enough to fill the largest card; more would only contend for the counter


def triton_adamw_step(
    param, residual, scale, amax, work, grad, m, v, m_scale, v_range, low,
    lr_tensor, grad_mul, found_inf, skipped,
    lr, beta1, beta2, eps, weight_decay, margin, step, key, clock=None,
):  # fmt: skip
    n_all = param.numel()
    if n_all == 0:
        return
    leads, n = leads_of(param)
    if n >= 2**31:
        raise ValueError(f"AdamW: a parameter of {n} elements is too large for one update (2**31)")
    groups = -(-n // GROUP)
    if m.dtype == torch.float32:
        states = "fp32"
    elif m_scale is None:
        states, m, v = "bf16", m.view(torch.int16), v.view(torch.int16)
    else:
        states, m = "8bit", m.view(torch.uint8)
    if residual is None:
        master = "fp32" if param.dtype == torch.float32 else "bf16"
    else:
        master = "codes" if scale is not None else "split"
    if master != "fp32":
        param = param.view(torch.uint8 if master == "codes" else torch.int16)
    copy = "none" if low is None else "bf16" if low.dtype == torch.bfloat16 else "cast"
    if copy == "bf16":
        low = low.view(torch.int16)
    counted = found_inf is not None and skipped is not None
    if counted:
        correct = [math.log(beta) if beta else -1e30 for beta in (beta1, beta2)]
    else:
        correct = corrections(beta1, beta2, step)

    def pointer(t):  # an absent tensor's pointer is never read
        return param if t is None else t

    grid = (min(-(-groups // _TILE), max(1, _PROGRAMS // leads)), leads)
    _adamw_kernel[grid](
        param, pointer(residual), pointer(scale), pointer(amax), pointer(work), grad, m, v,
        pointer(m_scale), pointer(v_range), pointer(low),
        lr if lr_tensor is None else lr_tensor, pointer(grad_mul), pointer(found_inf),
        pointer(skipped), pointer(clock), beta1, beta2, 1.0 - beta1, 1.0 - beta2, *correct,
        update_bound(beta1, beta2), max(eps, LEAST_EPS), weight_decay, step, key, n, groups, leads,
        MASTER=master, BITS=0 if residual is None else 8 * residual.element_size(), STATES=states,
        LOW=copy, LR_TENSOR=lr_tensor is not None, CLOCK=clock is not None,
        MUL=grad_mul is not None, GUARD=found_inf is not None, COUNTED=counted, MARGIN=margin,
        LEADS=triton.next_power_of_2(leads), TILE=_TILE,
        DRAWS=states != "fp32" or master != "fp32", FAST=not INTERPRETED,
    )  # fmt: skip


adamw_step = operator(
    "adamw_step(Tensor(a!) param, Tensor(b!)? residual, Tensor(c!)? scale, Tensor(d!)? amax, "
    "Tensor(e!)? work, Tensor grad, Tensor(f!) m, Tensor(g!) v, Tensor(h!)? m_scale, "
    "Tensor(i!)? v_range, Tensor(j!)? low, Tensor? lr_tensor, Tensor? grad_mul, "
    "Tensor? found_inf, Tensor(k!)? skipped, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int margin, int step, int key, Tensor? clock=None) -> ()",
    reference=ref_adamw_step,
    fake=lambda *args: None,
    cuda=triton_adamw_step,
)
