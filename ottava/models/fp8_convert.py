"""From one layout of FP8 files to the other, a group at a time: the model is never in memory.

Weights that both layouts store alike keep their codes and scales, bit for bit. Fused qkv, whose
blocks are cut elsewhere, gets new ones (one more rounding to E4M3).
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from .fp8_checkpoint import open_fp8, read_group
from .fp8_layout import Group
from .fp8_save import Saving, whole_folder
from .storage import Form, Storage


def convert_fp8(
    path_or_id: str | Path,
    model: nn.Module,
    out: str | Path,
    layout: str,
    *,
    source_layout: str | None = None,
    max_shard_bytes: int = 5 << 30,
) -> Path:
    """Write the FP8 files of `path_or_id` again in `layout`; returns the folder `out`.

    model: on meta; it says what there is. Errors as `load_fp8` and `save_fp8`.
    """
    with whole_folder(out) as folder:
        shards, jobs, origin = open_fp8(path_or_id, model, source_layout)
        try:
            _Converting(model, layout, max_shard_bytes, origin, shards, jobs).write(folder)
        finally:
            shards.close()
    return Path(out)


class _Converting(Saving):
    """A `Saving` whose values come from files. The group read last is kept, for its neighbours."""

    def __init__(self, model, layout, max_shard_bytes, origin, shards, jobs) -> None:
        super().__init__(model, layout, max_shard_bytes, origin)
        self.shards = shards
        self.job_of = {(p.target, p.index): j for j in jobs for p in j.group.parts}
        self.last: tuple = (None, {})

    def slots(self, group: Group) -> list[Storage]:
        """The values of a group's parts, read now."""
        return [self._slot((p.target, p.index)) for p in group.parts]

    def _slot(self, part: tuple[str, int | None]) -> Storage:
        job = self.job_of[part]
        if self.last[0] is not job:
            self.last = (None, {})
            _, _, values = read_group(self.shards, job, self.origin, "cpu")
            parts = [(p.target, p.index) for p in job.group.parts]
            self.last = job, dict(zip(parts, job.group.to_model(values), strict=True))
        value = self.last[1][part]
        return Storage(Form(value.dtype), value)
