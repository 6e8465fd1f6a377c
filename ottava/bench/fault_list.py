"""The list of faults: what is injected, and what it may cost at most."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass

from . import fault_inside as inside
from . import fault_outside as outside
from .fault_outside import once, spoiled_line, with_settings
from .fault_runs import SAVE_EVERY

AT = 33  # the step that most faults come with: three after a checkpoint
BACK = SAVE_EVERY + 3  # to the checkpoint before, from the last of three bad steps
NAN, INF = math.nan, math.inf


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`lost`: most steps that it may cost. `within`: of the undisturbed run's loss, as a share.
    `same_bits`: whether the weights must end the same. `detected`: whether somebody must have said
    something (nobody notices a clock). `beside`: the undisturbed run that it is held against."""

    name: str
    injected: str
    act: outside.Act
    lost: int = 0
    within: float = 0.01
    same_bits: bool = False
    detected: bool = True
    beside: str = "undisturbed"
    quick: bool = False  # in the short list too


def _fault(name: str, injected: str, act: outside.Act, **settings) -> Fault:
    return Fault(name=name, injected=injected, act=act, **settings)


def faults(kills: int) -> list[Fault]:
    """All of them, in the table's order. `kills`: how often SIGKILL comes."""
    return [*_data(), *_steps(), *_memory_cells(), *_casts(), *_checkpoints(), *_processes(kills),
            *_machine()]  # fmt: skip


def _data() -> list[Fault]:
    bits = {"same_bits": True}
    return [
        _fault("nan-in-data", '`{"text": NaN}` in the data', spoiled_line(b'{"text": NaN}'), **bits),
        _fault("inf-in-data", '`{"text": Infinity}` in the data', spoiled_line(b'{"text": Infinity}'),
               **bits),
        _fault("broken-line", "a line of the data cut off", spoiled_line(b'{"text": "li'),
               quick=True, **bits),
        _fault("not-utf8", "a line of the data with a byte 0xff", spoiled_line(b'{"text": "\xff"}'),
               **bits),
        _fault("data-changed", "the data changed between two starts", outside.changed_data,
               lost=SAVE_EVERY, **bits),
        _fault("bad-token", "a token id beyond the vocabulary", once(inside.bad_token(AT)),
               lost=SAVE_EVERY, **bits),
        _fault("hung-loader", "the data loader does not come back", once(inside.hung_loader(AT)),
               lost=SAVE_EVERY, **bits),
    ]  # fmt: skip


def _steps() -> list[Fault]:
    return [
        _fault("nan-in-input", "NaN in the embedding's output, one step",
               once(inside.bad_input(AT, NAN)), lost=1, quick=True),
        _fault("inf-in-input", "inf in the embedding's output, one step",
               once(inside.bad_input(AT, INF)), lost=1),
        _fault("nan-in-row", "one row gives NaN in 8 bits, for good",
               once(inside.bad_row(AT)), lost=BACK, quick=True),
        _fault("nan-in-gradient", "NaN in a gradient, one step",
               once(inside.bad_gradient(AT, NAN)), lost=1),
        _fault("inf-in-gradient", "inf in a gradient, one step",
               once(inside.bad_gradient(AT, INF)), lost=1),
        _fault("exploding-lr", "learning rate x 1000 for four steps",
               once(inside.high_rate(AT, 1e3, 4)), lost=2 * BACK),
    ]  # fmt: skip


def _memory_cells() -> list[Fault]:
    return [
        _fault("nan-in-weight", "NaN written into a weight", once(inside.bad_weight(AT, NAN)),
               lost=BACK, quick=True),
        _fault("inf-in-weight", "inf written into a weight", once(inside.bad_weight(AT, INF)),
               lost=BACK),
        _fault("nan-in-moment", "NaN written into a moment (m)",
               once(inside.bad_moment(AT, "m", NAN)), lost=BACK),
        _fault("inf-in-moment", "inf written into a moment (m)",
               once(inside.bad_moment(AT, "m", INF)), lost=BACK),
        _fault("nan-before-save", "NaN in a moment (v), in the very step that is saved",
               once(inside.bad_moment(35, "v", NAN)), lost=BACK, quick=True),
        _fault("inf-before-save", "inf in a moment (v), in the very step that is saved",
               once(inside.bad_moment(35, "v", INF)), lost=BACK),
    ]  # fmt: skip


def _casts() -> list[Fault]:
    # reported, not repaired: a cast that clips makes no step bad
    delayed = {"beside": "delayed", "within": 0.05}
    return [
        _fault("saturation", "delayed scaling's memory of inputs / 64, ten steps",
               with_settings(once(inside.wrong_scales(AT, 0, 1 / 64)), precision={"recipe": "delayed"}),
               **delayed),
        _fault("underflow", "its memory of gradients x 2^20, ten steps",
               with_settings(once(inside.wrong_scales(AT, 2, 2.0**20)),
                             precision={"recipe": "delayed"}), **delayed),
    ]  # fmt: skip


def _checkpoints() -> list[Fault]:
    passed_over = {"lost": 2 * SAVE_EVERY, "same_bits": True}
    return [
        _fault("bit-flip", "one bit of the newest checkpoint flipped",
               outside.harmed(outside.flip_a_bit), quick=True, **passed_over),
        _fault("truncated", "a file of the newest checkpoint cut in half",
               outside.harmed(outside.truncate), **passed_over),
        _fault("missing-file", "a file of the newest checkpoint gone",
               outside.harmed(outside.lose_a_file), **passed_over),
        _fault("missing-manifest", "the newest checkpoint's manifest gone",
               outside.harmed(outside.lose_the_manifest), **passed_over),
        _fault("all-damaged", "a bit flipped in every checkpoint, then train.resume=never",
               outside.all_damaged, lost=60, same_bits=True),
        _fault("disk-full", "the disk of the checkpoints full for good, then not",
               outside.full_disk, lost=3 * SAVE_EVERY, same_bits=True),
        _fault("disk-full-once", "the disk full at one checkpoint, writing in the background",
               with_settings(outside.disk_full_once, train={"save": "background"}), same_bits=True,
               quick=True),
    ]  # fmt: skip


def _processes(kills: int) -> list[Fault]:
    long = {"same_bits": True, "beside": "long"}
    each = {"train": {"checkpoint_every": 1}}
    behind = {"train": {"checkpoint_every": 1, "save": "background"}}
    return [
        _fault("sigkill", f"SIGKILL at a random moment, {kills} times",
               outside.killed_at_random(kills), lost=kills * (SAVE_EVERY + 1), quick=True, **long),
        _fault("sigkill-saving", f"SIGKILL while saving, {kills} times",
               with_settings(outside.killed_while_saving(kills), **each), lost=kills, same_bits=True),
        _fault("sigkill-background", f"SIGKILL while saving in the background, {kills} times",
               with_settings(outside.killed_while_saving(kills), **behind), lost=3 * kills, same_bits=True),
        _fault("sigterm", "SIGTERM", outside.told_to_stop(signal.SIGTERM), same_bits=True,
               quick=True),
        _fault("sigusr1", "SIGUSR1, as schedulers send", outside.told_to_stop(signal.SIGUSR1),
               same_bits=True),
        _fault("dead-rank", "one of two ranks killed (SIGKILL)", outside.lost_rank(signal.SIGKILL),
               lost=SAVE_EVERY + 1, same_bits=True, beside="two-ranks"),
        _fault("hung-rank", "one of two ranks stopped (SIGSTOP)", outside.lost_rank(signal.SIGSTOP),
               lost=SAVE_EVERY + 1, same_bits=True, beside="two-ranks"),
    ]  # fmt: skip


def _machine() -> list[Fault]:
    crowded = {"train": {"micro_batch": 64, "checkpoint_every": 2}}
    return [
        _fault("out-of-memory", "no address space for a step's micro-batch of 64, at the start",
               with_settings(once(inside.little_memory(divisible=True)), **crowded),
               beside="crowded", quick=True),
        _fault("out-of-memory-for-good", "the same where smaller ones do not fit either",
               with_settings(once(inside.little_memory(divisible=False)), **crowded),
               lost=2, beside="crowded", same_bits=True),
        _fault("clock-back", "clocks jump back an hour and stand still", once(inside.clock_back(AT)),
               same_bits=True, detected=False, quick=True),
    ]  # fmt: skip
