"""Just enough PTX on numpy to run the inline assembly of a kernel where there is no GPU."""

import inspect
import re

import numpy as np

F32, F16, U32 = np.float32, np.float16, np.uint32


def assembly(fn) -> str:
    """The inline assembly in the source of a `triton.jit` function."""
    (text,) = re.findall(r'"""\{(.*?)\}"""', inspect.getsource(getattr(fn, "fn", fn)), re.S)
    return text


def _floats(x):
    return x.view(F32)


def _halves(x):
    return x.view(F16).reshape(*x.shape, 2)


def _pair(x):
    return np.ascontiguousarray(x.astype(F16)).view(U32)[..., 0]


def _signed(x):
    return x.view(np.int32)


def _prmt(a, b, selector):
    source = np.stack([(r >> U32(8 * i)) & U32(255) for r in (a, b) for i in range(4)])
    out = np.zeros_like(a)
    for i in range(4):
        pick = int(selector.flat[0]) >> 4 * i & 15
        byte = source[pick & 7]
        if pick & 8:
            byte = np.where(byte & U32(128), U32(255), U32(0))
        out |= byte << U32(8 * i)
    return out


def _lop3(a, b, c, table):
    out = np.zeros_like(a)
    for i in range(8):
        if int(table.flat[0]) >> i & 1:
            bits = [r if i >> k & 1 else ~r for r, k in ((a, 2), (b, 1), (c, 0))]
            out |= bits[0] & bits[1] & bits[2]
    return out


def _fma(kind, a, b, c):
    out = kind(a).astype(np.float64) * kind(b) + kind(c)
    return out.astype(F16 if kind is _halves else F32)


OPS = {
    "mov.b32": lambda a: a.copy(),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "shl.b32": lambda a, b: a << b,
    "shr.s32": lambda a, b: (_signed(a) >> _signed(b)).view(U32),
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "abs.f32": lambda a: a & U32(0x7FFFFFFF),
    "min.f32": lambda a, b: np.fmin(_floats(a), _floats(b)).view(U32),  # of a NaN and b: b
    "max.s16x2": lambda a, b: np.maximum(
        a.view(np.int16).reshape(-1, 2), b.view(np.int16).reshape(-1, 2)
    ).view(U32)[:, 0],
    "fma.rn.f32": lambda a, b, c: _fma(_floats, a, b, c).view(U32),
    "add.rn.f16x2": lambda a, b: _pair(_halves(a) + _halves(b)),
    "fma.rn.f16x2": lambda a, b, c: _pair(_fma(_halves, a, b, c)),
    "fma.rn.relu.f16x2": lambda a, b, c: _pair(np.maximum(_fma(_halves, a, b, c), F16(0))),
    "cvt.rn.f16x2.f32": lambda high, low: _pair(np.stack([_floats(low), _floats(high)], -1)),
}


def run(text: str, outputs: int, *inputs: np.ndarray) -> list[np.ndarray]:
    """Run assembly on 1-D inputs (32-bit registers $outputs, ...); the registers $0, ... as uint32."""
    count = len(inputs[0])
    at = {f"${outputs + i}": np.ascontiguousarray(x).view(U32) for i, x in enumerate(inputs)}

    def read(name):
        if name in at:
            return at[name]
        literal = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(count, literal, U32)

    for line in filter(None, (part.strip() for part in text.split(";"))):
        if line.startswith(".reg"):
            continue
        op, rest = line.split(None, 1)
        pair = re.match(r"\{(\w+), (\w+)\}, (\w+)", rest)
        if pair:
            word = read(pair[3])
            at[pair[1]], at[pair[2]] = word & U32(0xFFFF), word >> U32(16)
            continue
        target, *arguments = (name.strip() for name in rest.split(","))
        values = [read(name) for name in arguments]
        if op == "cvt.f32.f16":
            at[target] = values[0].astype(np.uint16).view(F16).astype(F32).view(U32)
        else:
            at[target] = OPS[op](*values)
    return [at[f"${i}"] for i in range(outputs)]
