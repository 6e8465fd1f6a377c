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


def make_key(seed: int, step: int, stream: int) -> int:
    """A 31-bit key (fits a signed kernel argument) from seed, step and stream (parameter) number."""
    return _hash(_hash(_hash(seed) + step) * 3 + stream) & 0x7FFFFFFF


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
