"""What the CUDA caching allocator makes of a list of allocations: block sizes, reserved bytes.

`torch.cuda.max_memory_allocated` counts blocks, not tensors: sizes are rounded to 512 bytes, and a
large block whose rest would be under 1 MiB is handed out whole. `CachingAllocator` follows those
rules in two ways: it chooses blocks itself (the planner, on any machine), or it is led by the
addresses of a real trace (`AllocatorRecorder`, on a GPU), where it is exact.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from .lifetimes import PHASES, Peak, Timeline, replay, state_tensors

MIN_BLOCK = 512
SMALL = 1 << 20  # requests up to here come from 2 MiB segments
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # requests under 10 MiB share segments of this size
MIN_OWN_SEGMENT = 10 << 20
ROUND_SEGMENT = 2 << 20
TRACE_ENTRIES = 2_000_000


class TraceError(RuntimeError):
    """The allocator's trace cannot be followed, so memory cannot be split by category."""


def round_size(nbytes: int) -> int:
    """The bytes that a request for `nbytes` is rounded up to."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


class CachingAllocator:
    """Free and used blocks by address. One stream; memory is never short.

    `allocated` and `reserved` are bytes now; `peak_reserved` the most that was reserved.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_reserved = 0
        self.used: dict[int, int] = {}  # address -> block bytes
        self._free: dict[int, int] = {}
        self._end_of_free: dict[int, int] = {}  # end address -> address
        self._by_size: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._segment: dict[int, tuple[int, bool]] = {}  # start -> (bytes, small)
        self._starts: list[int] = []
        self._next_address = ROUND_SEGMENT

    def alloc(self, nbytes: int) -> int:
        """Take the smallest free block that fits, or a new segment; its address."""
        size = round_size(nbytes)
        small = size <= SMALL
        blocks = self._by_size[small]
        found = bisect_left(blocks, (size, 0))
        if found < len(blocks):
            address = blocks[found][1]
        else:
            total = SMALL_SEGMENT if small else LARGE_SEGMENT
            if size >= MIN_OWN_SEGMENT:
                total = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
            # One page between segments, so that blocks of two segments never look adjacent.
            address = self._next_address
            self._next_address += total + MIN_BLOCK
            self.add_segment(address, total, small)
        self.take(address, nbytes)
        return address

    def take(self, address: int, nbytes: int) -> int:
        """Use the free block at `address` for a request; the block's bytes after splitting."""
        size, block = round_size(nbytes), self._free[address]
        small = self._is_small(address)
        rest = block - size
        self._remove_free(address, small)
        if rest >= MIN_BLOCK if small else rest > SMALL:
            self._add_free(address + size, rest, small)
            block = size
        self.used[address] = block
        self.allocated += block
        return block

    def is_free(self, address: int) -> bool:
        """Whether a free block starts at `address`."""
        return address in self._free

    def release(self, address: int) -> None:
        """Stop counting the block; it becomes reusable with `give_back`."""
        self.allocated -= self.used[address]

    def give_back(self, address: int) -> None:
        """Make a released block free again, merged with its free neighbours."""
        size, small = self.used.pop(address), self._is_small(address)
        start = self._segment_start(address)
        if (before := self._end_of_free.get(address)) is not None and before >= start:
            size += self._free[before]
            self._remove_free(before, small)
            address = before
        after = address + size
        if after in self._free and self._segment_start(after) == start:
            size += self._free[after]
            self._remove_free(after, small)
        self._add_free(address, size, small)

    def free(self, address: int) -> None:
        """Release and give back."""
        self.release(address)
        self.give_back(address)

    def add_segment(self, address: int, nbytes: int, small: bool) -> None:
        """A new segment, all of it one free block."""
        insort(self._starts, address)
        self._segment[address] = (nbytes, small)
        self._add_free(address, nbytes, small)
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def drop_segment(self, address: int) -> None:
        """A segment goes back to the driver; it must be one free block."""
        nbytes, small = self._segment.pop(address)
        self._starts.remove(address)
        self._remove_free(address, small)
        self.reserved -= nbytes

    def _segment_start(self, address: int) -> int:
        return self._starts[bisect_left(self._starts, address + 1) - 1]

    def _is_small(self, address: int) -> bool:
        return self._segment[self._segment_start(address)][1]

    def _add_free(self, address: int, size: int, small: bool) -> None:
        self._free[address] = size
        self._end_of_free[address + size] = address
        insort(self._by_size[small], (size, address))

    def _remove_free(self, address: int, small: bool) -> None:
        size = self._free.pop(address)
        del self._end_of_free[address + size]
        blocks = self._by_size[small]
        del blocks[bisect_left(blocks, (size, address))]


def block_sizes(timeline: Timeline) -> tuple[dict[int, int], int]:
    """Bytes of the block that every storage of a timeline would get on CUDA, and peak reserved."""
    allocator = CachingAllocator()
    where: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for storage, nbytes in timeline.events:
        if nbytes > 0:
            where[storage] = allocator.alloc(nbytes)
            sizes[storage] = allocator.used[where[storage]]
        else:
            allocator.free(where.pop(storage))
    return sizes, allocator.peak_reserved


def priced(timeline: Timeline, device: str) -> tuple[Peak, int]:
    """The peak of a timeline on `device`: in allocator blocks on "cuda", with the bytes reserved;
    in bytes of tensors, and 0, on "cpu"."""
    if device != "cuda":
        return replay(timeline), 0
    sizes, reserved = block_sizes(timeline)
    return replay(timeline, sizes), reserved


class AllocatorRecorder:
    """Records a CUDA device's allocator; same use as MemoryTracker (watch, mark, timeline).

    After the `with` block `timeline` holds blocks in place of storages, and replaying it gives
    `torch.cuda.max_memory_allocated` of the same span. Costs a snapshot at every mark, so steps
    under it are not for timing.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        device = torch.device(device)
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.timeline = Timeline()
        self._watched: tuple[nn.Module, object, object] | None = None
        self._marks: list[tuple[int, str]] = []
        self._since = 0
        self._known: list[tuple[int, dict[int, str]]] = []  # (trace length, address -> category)

    def __enter__(self) -> AllocatorRecorder:
        torch.cuda.synchronize(self.device)
        torch.cuda.memory._record_memory_history(
            enabled="all",
            context=None,
            stacks="python",
            max_entries=TRACE_ENTRIES,
            clear_history=True,
        )
        self._before = self._snapshot()
        return self

    def __exit__(self, *exc) -> None:
        try:
            if exc[0] is None:
                self.timeline = self._build(self._snapshot()["device_traces"][self.device])
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def watch(self, model: nn.Module, optimizer=None, average=None) -> None:
        """Register everything that outlives a step, now and again at every mark."""
        self._watched = (model, optimizer, average)

    def mark(self, phase: str) -> None:
        """Start a phase: "forward", "backward", "step", or "idle" after the last."""
        if phase not in PHASES:
            raise ValueError(f"mark: {phase!r} is not one of {', '.join(PHASES)}")
        at = len(self._snapshot()["device_traces"][self.device])
        self._marks.append((at, phase))
        if self._watched is None:
            return
        known = {_address(t): category for category, t in state_tensors(*self._watched)}
        for parameter in self._watched[0].parameters():
            if parameter.grad is not None:
                known[_address(parameter.grad)] = "gradients"
        self._known.append((at, known))

    def start_span(self) -> None:
        """The peak that counts is the peak from here on."""
        self._since = len(self._snapshot()["device_traces"][self.device])
        torch.cuda.reset_peak_memory_stats(self.device)

    def _snapshot(self) -> Mapping:
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory._snapshot()

    def _build(self, trace: list[dict]) -> Timeline:
        allocator, block_of, timeline = CachingAllocator(), {}, Timeline()
        for address, nbytes in _load_segments(allocator, self._before["segments"], self.device):
            block_of[address] = len(timeline.events)
            timeline.events.append((block_of[address], nbytes))
        start = len(self._before["device_traces"][self.device])
        marks, known = list(self._marks), list(self._known)
        count = len(timeline.events)
        for i in range(start, len(trace) + 1):
            if i == self._since:
                timeline.since = len(timeline.events)
            while marks and marks[0][0] <= i:
                timeline.marks.append((len(timeline.events), marks.pop(0)[1]))
            while known and known[0][0] <= i:
                for address, category in known.pop(0)[1].items():
                    if address in block_of:
                        timeline.labels[block_of[address]] = category
            if i == len(trace):
                break
            entry = trace[i]
            action, address, size = entry["action"], entry.get("addr", 0), entry["size"]
            if action == "alloc":
                block_of[address], count = count, count + 1
                if not allocator.is_free(address):
                    raise TraceError(f"memory trace: block {address:#x} was not known to be free")
                block = allocator.take(address, size)
                timeline.events.append((block_of[address], block))
            elif action == "free_requested":
                nbytes = allocator.used[address]
                allocator.release(address)
                timeline.events.append((block_of.pop(address), -nbytes))
            elif action == "free_completed":
                allocator.give_back(address)
            elif action == "segment_alloc":
                allocator.add_segment(address, size, size == SMALL_SEGMENT)
            elif action == "segment_free":
                allocator.drop_segment(address)
            elif action in ("segment_map", "segment_unmap"):
                raise TraceError(
                    "memory trace: expandable segments are on; unset expandable_segments in "
                    "PYTORCH_CUDA_ALLOC_CONF to see memory by category"
                )
        return timeline


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _load_segments(
    allocator: CachingAllocator, segments: Iterable[Mapping], device: int
) -> list[tuple[int, int]]:
    """Put a snapshot's blocks into the allocator; (address, bytes) of those in use."""
    in_use = []
    for segment in segments:
        if segment["device"] != device:
            continue
        small = segment["segment_type"] == "small"
        allocator.add_segment(segment["address"], segment["total_size"], small)
        allocator._remove_free(segment["address"], small)
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                allocator._add_free(block["address"], block["size"], small)
                continue
            allocator.used[block["address"]] = block["size"]
            allocator.allocated += block["size"]
            if block["state"] == "active_allocated":
                in_use.append((block["address"], block["size"]))
            else:  # its free was requested before: only the completion is still to come
                allocator.release(block["address"])
    return in_use
