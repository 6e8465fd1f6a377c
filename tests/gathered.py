"""What ranks hold in shares, whole on every one of them, for a test to look at."""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ottava.distributed.shards import cut
from ottava.kernels.split import Split, adopt_split


def whole(t):
    """A sharded tensor, or split master, whole on the CPU; any other as it is. All ranks call it."""
    if getattr(t, "local_split", None) is not None:
        parts = {k: whole(part) for k, part in t.parts().items()}
        split = Split(parts["codes"], parts["residual"], parts.get("scale"))
        return adopt_split(torch.nn.Parameter(split.codes), split, parts.get("amax"), t.cast)
    if not isinstance(t, DTensor):
        return t
    (world, _), mesh, part = cut(t), t.device_mesh, t._local_tensor
    row_bytes = math.prod(t.shape[1:]) * part.element_size()
    padded = torch.zeros(-(-t.shape[0] // world) * row_bytes, dtype=torch.uint8)
    mine = part.detach().contiguous().reshape(-1).view(torch.uint8)
    padded[: mine.numel()] = mine
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=mesh.get_group(mesh.ndim - 1))
    return torch.cat(parts)[: t.shape[0] * row_bytes].view(part.dtype).view(t.shape)
