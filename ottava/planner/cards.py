"""GPUs by name: the memory that torch sees, what a process takes before its first tensor, speeds.

Only the H200's speeds were measured (benchmarks/h200.md). The others' are their data sheets', times
the share of its own data sheet that the H200 reached.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTEXT_GIB = 0.6  # CUDA context and loaded kernels, which torch does not allocate


@dataclass(frozen=True, kw_only=True)
class Card:
    """`gib`: of memory as torch sees it. Speeds in FLOP/s and bytes/s, as reached; `fp8` 0: no FP8
    unit. `nvlink`: GB/s each way to the GPUs of its node. `measured`: whether the speeds were."""

    name: str
    gib: float
    fp8: float
    bf16: float
    fp32: float
    attention: float
    memory: float
    nvlink: float
    measured: bool = False

    @property
    def room_gib(self) -> float:
        """GiB for tensors."""
        return self.gib - CONTEXT_GIB


_H200 = {"fp8": 1979e12, "bf16": 989e12, "memory": 4.8e12}  # its data sheet, dense
_REACHED = {"fp8": 1210e12, "bf16": 680e12, "fp32": 45e12, "attention": 470e12, "memory": 3.5e12}


def _card(name: str, gib: float, fp8: float, bf16: float, memory: float, nvlink: float) -> Card:
    """A card by its data sheet: TFLOP/s dense, TB/s, GB/s."""
    compute = bf16 * 1e12 / _H200["bf16"]
    return Card(
        name=name,
        gib=gib,
        fp8=fp8 * 1e12 * _REACHED["fp8"] / _H200["fp8"],
        bf16=_REACHED["bf16"] * compute,
        fp32=_REACHED["fp32"] * compute,
        attention=_REACHED["attention"] * compute,
        memory=memory * 1e12 * _REACHED["memory"] / _H200["memory"],
        nvlink=nvlink,
        measured=name == "h200",
    )


CARDS = {
    c.name: c
    for c in (
        _card("h200", 139.8, 1979, 989, 4.8, 450),
        _card("h100", 79.2, 1979, 989, 3.35, 450),
        _card("a100", 79.2, 0, 312, 2.04, 300),
        _card("4090", 23.6, 330, 165, 1.01, 25),
        _card("5090", 31.4, 419, 210, 1.79, 50),
    )
}


def card_of(text: str) -> Card:
    """A card by its name; or of so many GiB, which has an H200's speeds.

    Raises ValueError for anything else.
    """
    name = text.lower().strip()
    if name in CARDS:
        return CARDS[name]
    try:
        gib = float(name)
    except ValueError:
        gib = 0.0
    if not 0 < gib < 1e6:
        raise ValueError(f"--card: {text!r} is neither one of {', '.join(CARDS)} nor a size in GiB")
    fields = {**vars(CARDS["h200"]), "name": f"{gib:g} GiB", "gib": gib + CONTEXT_GIB}
    return Card(**{**fields, "measured": False})
