"""Moments in the host's memory that visit the GPU for their update, while backward goes on.

Two slots on the GPU hold the moments of one parameter each. While a parameter is updated from one
slot, the next one's moments come into the other, and the last one's go back: three streams, so that
both directions of the bus and the kernels run at once. Which parameter is next is what came next in
the step before; a guess that was wrong costs the wait for one copy and nothing else.

On a device without streams (the CPU, a planner's fake tensors) the same copies are made in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("m", "v", "m_scale", "v_range")
SLOTS = 2
_ALIGN = 256  # bytes between two moments in a slot


def to_host(moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in the host's memory, pinned where they came from a GPU."""
    out = {}
    for name, x in moments.items():
        out[name] = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        out[name].copy_(x)
    return out


@dataclass
class _Slot:
    """Room for one parameter's moments. `owner`: whose they are; `dirty`: updated, not yet back."""

    room: Tensor
    owner: Tensor | None = None
    views: dict[str, Tensor] = field(default_factory=dict)
    loaded: Any = None  # event: the moments have arrived
    returned: Any = None  # event: they are back, so that the room is free

    def fill(self, host: dict[str, Tensor]) -> None:
        """Views of the room for these moments, and the copies into them, on the current stream."""
        at = 0
        self.views = {}
        for name, x in host.items():
            view = self.room[at : at + x.nbytes].view(x.dtype).view(x.shape)
            view.copy_(x, non_blocking=True)
            self.views[name] = view
            at += -(-x.nbytes // _ALIGN) * _ALIGN


class HostMoments:
    """The slots of one optimizer on one device."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._after: dict[Tensor, Tensor] = {}  # parameter -> the one updated after it
        self._last: Tensor | None = None
        self._streams: tuple[Any, Any] | None = None

    @contextmanager
    def visiting(
        self, p: Tensor, states: Mapping[Tensor, dict[str, Any]], device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """`p`'s moments on `device`, to be updated in place; what they are then goes back."""
        host = _moments(states[p])
        if self._last is not None:
            self._after[self._last] = p
        self._last = p
        slot = self._slot_of(p)
        if slot is None:
            slot = self._load(p, host, device)
        if slot.loaded is not None:
            torch.cuda.current_stream(device).wait_event(slot.loaded)
        yield slot.views
        self._return(slot, host, device)
        after = self._after.get(p)
        if after is not None and self._slot_of(after) is None and "m" in states.get(after, {}):
            self._load(after, _moments(states[after]), device)

    def finish(self) -> None:
        """End of a step: what the device does next comes after every copy. No event outlives a
        step, since a captured one may wait only for its own."""
        self._last = None
        for slot in self._slots:
            slot.owner = None  # the host's moments may change before the next step: a checkpoint
            for event in (slot.loaded, slot.returned):
                if event is not None:
                    torch.cuda.current_stream(slot.room.device).wait_event(event)
            slot.loaded = slot.returned = None

    def synchronize(self) -> None:
        """Wait until the host's moments are those of the last step."""
        for slot in self._slots:
            if slot.room.is_cuda:
                torch.cuda.synchronize(slot.room.device)

    def _slot_of(self, p: Tensor) -> _Slot | None:
        return next((s for s in self._slots if s.owner is p), None)

    def _load(self, p: Tensor, host: dict[str, Tensor], device) -> _Slot:
        """Bring `p`'s moments into the slot that was used longest ago."""
        size = sum(-(-x.nbytes // _ALIGN) * _ALIGN for x in host.values())
        if not self._slots or size > self._slots[0].room.numel():
            self._make(size, device)
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.owner = p
        with self._on(0, device) as stream:
            if slot.returned is not None:
                stream.wait_event(slot.returned)
            slot.fill(host)
            slot.loaded = None if stream is None else stream.record_event()
        return slot

    def _return(self, slot: _Slot, host: dict[str, Tensor], device) -> None:
        with self._on(1, device) as stream:
            for name, x in host.items():
                x.copy_(slot.views[name], non_blocking=True)
            slot.owner = None
            slot.returned = None if stream is None else stream.record_event()

    def _make(self, size: int, device: torch.device) -> None:
        """New slots of `size` bytes; the old ones' copies end first."""
        if self._streams is not None:
            torch.cuda.synchronize(device)
        elif torch.device(device).type == "cuda" and torch.cuda.is_available():
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._slots = []
        self._slots = [
            _Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(SLOTS)
        ]

    @contextmanager
    def _on(self, number: int, device) -> Iterator[Any]:
        """The stream into (0) or out of (1) the device, after all that was launched before."""
        if self._streams is None:
            yield None
            return
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield stream


def _moments(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: state[name] for name in MOMENTS if name in state}
