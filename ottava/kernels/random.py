"""Random bits from a counter: the same bits for the same (seed, step, stream, element), anywhere.

Stochastic rounding must give the same weights after a kill and resume, on one rank or several, so
it never draws from a global generator. The hash is a 32-bit finaliser ("lowbias32", a published
low-bias integer hash), applied to the element index under a key made from the other three.
"""

from __future__ import annotations

import torch

from .op import tl, triton

_M1, _M2, _MASK = 0x7FEB352D, 0x846CA68B, 0xFFFFFFFF


def _hash(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 16)) * _M1) & _MASK
    x = ((x ^ (x >> 15)) * _M2) & _MASK
    return x ^ (x >> 16)


def step_key(seed: int, step: int) -> int:
    """The 32 bits that the keys of all streams have in common in one step."""
    return _hash(_hash(seed) + step)


def stream_key(step_key: int, stream: int) -> int:
    """A 31-bit key (fits a signed kernel argument) of one stream (parameter number) in a step."""
    return _hash(step_key * 3 + stream) & 0x7FFFFFFF


def make_key(seed: int, step: int, stream: int) -> int:
    """A 31-bit key from seed, step and stream number."""
    return stream_key(step_key(seed, step), stream)


def ref_random_bits(index: torch.Tensor, key: int) -> torch.Tensor:
    """32 random bits per element, as int64 in [0, 2^32). index: int64 tensor of element numbers."""
    x = (index ^ key) & _MASK
    x = ((x ^ (x >> 16)) * _M1) & _MASK
    x = ((x ^ (x >> 15)) * _M2) & _MASK
    x = x ^ (x >> 16)
    # One more round with the key added: neighbouring keys then differ in all bits.
    x = (x + key) & _MASK
    x = ((x ^ (x >> 16)) * _M1) & _MASK
    return x ^ (x >> 15)


@triton.jit
def random_bits(index, key):
    """Triton twin of `ref_random_bits`: uint32 bits for int32/int64 element numbers."""
    x = index.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    x = x + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    return x ^ (x >> 15)


@triton.jit
def triton_stream_key(step_key, stream):
    """Triton twin of `stream_key`: int32 from the 32 bits of step_key and an int32 stream number."""
    x = step_key.to(tl.uint32, bitcast=True) * 3 + stream.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x & 0x7FFFFFFF).to(tl.int32)
