"""Plans for several GPUs as a person reads them: tables, and the bar of what takes memory."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .ranks import Layout
from .several import RankPlan


def layout_in_words(layout: Layout) -> str:
    """ "fsdp2 on 64 GPUs, 8 nodes"."""
    words = f"{layout.strategy} on {layout.gpus} GPU{'s' * (layout.gpus > 1)}"
    if layout.nodes > 1:
        words += f", {layout.nodes} nodes"
    if layout.experts_over > 1:
        words += f", a layer's experts over {layout.experts_over}"
    return words


def rank_page(plan: RankPlan, room_gib: float, card: str) -> Group:
    """A plan for several GPUs."""
    memory, time = plan.memory, plan.time
    verdict = "fits" if memory.fits(room_gib) else "does not fit"
    sent = Table("sent by each GPU in a step", "GB", "s on the links", box=None, pad_edge=False)
    sent.columns[1].justify = sent.columns[2].justify = "right"
    for kind, nbytes in time.sent.nbytes.items():
        if nbytes:
            sent.add_row(kind, f"{nbytes / 1e9:,.2f}", f"{time.sent.seconds[kind]:.3f}")
    lines = [
        f"PREDICTED: {time.seconds:.3f} s a step, {time.tok_per_s:,.0f} tokens/s of all GPUs; the GPU "
        f"computes {time.compute:.3f} s and waits {time.exposed:.3f} s ({time.apart:.3f} s a step if "
        "nothing overlapped)"
    ]
    parts = [memory, Text(f"each rank {verdict} into {room_gib:.1f} GiB ({card})", style="bold")]
    parts.append(Text(f"\n{layout_in_words(plan.layout)}", style="bold"))
    parts += [sent] if sent.row_count else []
    return Group(*parts, *lines, *(f"note: {note}" for note in plan.notes))


def rank_dict(plan: RankPlan, room_gib: float) -> dict:
    """The same as plain data."""
    time = plan.time
    return {
        "memory": plan.memory.to_dict(),
        "gib": room_gib,
        "fits": plan.memory.fits(room_gib),
        "layout": {
            "strategy": plan.layout.strategy,
            "gpus": plan.layout.gpus,
            "nodes": plan.layout.nodes,
            "experts_over": plan.layout.experts_over,
        },
        "predicted": {
            "step_s": time.seconds,
            "compute_s": time.compute,
            "exposed_s": time.exposed,
            "without_overlap_s": time.apart,
            "tok_per_s": time.tok_per_s,
            "launches": time.launches,
            "sent_bytes": time.sent.nbytes,
            "sent_s": time.sent.seconds,
        },
        "notes": list(plan.notes),
    }
