"""Which tensors a checkpoint of a model holds: names, rows, scale grids, and the parameters they fill.

Layouts, which differ for attention alone:
"canonical": rows as the model has them, qkv [all Q | all K | all V], blocks counted from row 0.
"released": as Xiaomi stores MiMo-V2. A fused qkv is `num_key_value_heads` chunks [Q_t | K_t | V_t],
each with a grid of its own, so that a block may hold the last rows of K_t and the first of V_t.
Split projections (V2-Flash) are the same chunks cut into three tensors: where K_t ends inside a
block, its scale lies in k's tensor and is V_t's too (read from loaders, not seen on real files).

The experts of a layer, two 3-D parameters here, are three tensors per expert in both.
Works on meta. 128-blocks unless config.json names another size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import MiMoConfig, MiMoV2Config
from .moe import Router

LAYOUTS = ("canonical", "released")
BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Grid:
    """How a stored weight's rows fall on rows of scales: `chunks` times `rows` rows, each chunk with
    a grid of its own, which it may share with other tensors: of the `whole` rows of a shared chunk
    this tensor holds those from `start` on. A shared block's scale lies with its first row."""

    chunks: int
    rows: int
    start: int = 0
    whole: int = 0

    def total(self, block: int) -> int:
        """Scale rows of one chunk, all sharers together."""
        return -(-(self.whole or self.rows) // block)

    def own(self, block: int) -> range:
        """Those of them that are stored with this tensor."""
        return range(-(-self.start // block), -(-(self.start + self.rows) // block))

    def index(self, block: int) -> Tensor:
        """int64 [chunks * rows]: the scale row of each row."""
        row = torch.arange(self.chunks * self.rows)
        return row // self.rows * self.total(block) + (row % self.rows + self.start) // block


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint. `grid`: None for what is no matrix."""

    name: str
    shape: tuple[int, ...]
    grid: Grid | None

    def scale_shape(self, block: tuple[int, int] = BLOCK) -> tuple[int, int]:
        """The shape of its grid of block scales."""
        return self.grid.chunks * len(self.grid.own(block[0])), -(-self.shape[1] // block[1])


@dataclass(frozen=True, slots=True)
class Part:
    """All of a model's tensor, or of its expert `index`."""

    target: str
    index: int | None
    rows: int


@dataclass(frozen=True, slots=True)
class Group:
    """Stored tensors and the parts of the model that they fill, rows after rows.

    `sections`: rows of Q, K and V of a tensor stored in `chunks` chunks; empty for any other.
    """

    parts: tuple[Part, ...]
    stored: tuple[Stored, ...]
    chunks: int = 1
    sections: tuple[int, ...] = ()

    @property
    def joint(self) -> bool:
        """Whether its tensors share scales."""
        return any(s.grid is not None and s.grid.whole for s in self.stored)

    @property
    def layout_matters(self) -> bool:
        """Whether the other layout stores it in another way."""
        return self.joint or bool(self.sections)

    def to_model(self, stored: list[Tensor]) -> list[Tensor]:
        """Rows of the stored tensors -> rows of each part."""
        x = stored[0] if len(stored) == 1 else torch.cat(stored)
        if self.sections:
            each = x.unflatten(0, (self.chunks, -1))
            rows = [s // self.chunks for s in self.sections]
            x = torch.cat([s.flatten(0, 1) for s in each.split(rows, 1)])
        return _cut(x, [p.rows for p in self.parts])

    def to_stored(self, parts: list[Tensor]) -> list[Tensor]:
        """The inverse of `to_model`."""
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.sections:
            each = [s.unflatten(0, (self.chunks, -1)) for s in x.split(self.sections)]
            x = torch.cat(each, 1).flatten(0, 1)
        return _cut(x, [s.shape[0] if s.shape else 1 for s in self.stored])


def _cut(x: Tensor, rows: list[int]) -> list[Tensor]:
    return [x] if len(rows) == 1 else list(x.split(rows))


def groups(model: nn.Module, layout: str) -> list[Group]:
    """Every tensor of a checkpoint of `model`, in the model's order; tied ones once.

    Raises ValueError for an unknown layout, and for head counts that do not divide into chunks.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}")
    seen: set[int] = set()
    out: list[Group] = []
    for prefix, module in model.named_modules():
        own = {n: t for n, t in _own_tensors(module) if id(t) not in seen}
        seen |= {id(t) for t in own.values()}
        name = f"{prefix}." if prefix else ""
        attention = layout == "released" and hasattr(module, "head_shapes")
        if attention and not module.fused and (shared := _shared(model.config, module, name)):
            out.append(shared)
            seen |= {id(m.weight) for m in (module.q_proj, module.k_proj, module.v_proj)}
        for key, tensor in own.items():
            if key in ("gate_up_proj", "down_proj") and tensor.dim() == 3:
                out += _experts(name, key, tensor.shape)
            else:
                out.append(_plain(name + key, tuple(tensor.shape)))
        if attention and module.fused:
            out += _chunked(model.config, module, name + "qkv_proj")
            seen |= {id(p) for p in module.qkv_proj.parameters()}
    return out


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of one module."""
    for name, p in module._parameters.items():
        if p is not None:
            yield name, p
    for name, b in module._buffers.items():
        if b is not None and name not in module._non_persistent_buffers_set:
            yield name, b


def _plain(name: str, shape: tuple[int, ...]) -> Group:
    grid = Grid(1, shape[0]) if len(shape) == 2 else None
    part = Part(name, None, shape[0] if shape else 1)
    return Group((part,), (Stored(name, shape, grid),))


def _experts(prefix: str, key: str, shape: torch.Size) -> list[Group]:
    count, rows, cols = shape
    names = ("gate_proj", "up_proj") if key == "gate_up_proj" else ("down_proj",)
    each = rows // len(names)
    grid = Grid(1, each)
    return [
        Group(
            (Part(prefix + key, e, rows),),
            tuple(Stored(f"{prefix}{e}.{n}.weight", (each, cols), grid) for n in names),
        )
        for e in range(count)
    ]


def _chunked(config, attention: nn.Module, name: str) -> list[Group]:
    """A fused projection in released chunks, and its bias if it has one."""
    chunks = _chunks(config, attention, name)
    sections = tuple(heads * dim for heads, dim in attention.head_shapes)
    out = []
    for key, p in attention.qkv_proj.named_parameters():
        shape = tuple(p.shape)
        grid = Grid(chunks, shape[0] // chunks) if len(shape) == 2 else None
        stored = Stored(f"{name}.{key}", shape, grid)
        part = Part(f"{name}.{key}", None, shape[0])
        out.append(Group((part,), (stored,), chunks, sections))
    return out


def _shared(config, attention: nn.Module, prefix: str) -> Group | None:
    """q, k and v of split projections whose chunks share blocks; None where none do."""
    if not isinstance(config, MiMoV2Config):
        return None
    chunks = _chunks(config, attention, prefix + "q_proj")
    q, k, v = (math.prod(s) // chunks for s in attention.head_shapes)
    if q % BLOCK[0] == 0 and k % BLOCK[0] == 0:
        return None
    cols = attention.q_proj.in_features
    stored, parts = [], []
    for key, rows, start in (("q_proj", q, 0), ("k_proj", k, q), ("v_proj", v, q + k)):
        name = f"{prefix}{key}.weight"
        grid = Grid(chunks, rows, start, q + k + v)
        stored.append(Stored(name, (chunks * rows, cols), grid))
        parts.append(Part(name, None, chunks * rows))
    return Group(tuple(parts), tuple(stored))


def _chunks(config, attention: nn.Module, name: str) -> int:
    chunks = config.num_key_value_heads
    for heads, _ in attention.head_shapes:
        if heads % chunks:
            raise ValueError(f"{name}: {heads} heads do not divide into {chunks} released chunks")
    return chunks


# ---- what is kept in what ----


def fp8_weights(model: nn.Module) -> set[str]:
    """Names of the model's tensors that are FP8 in a checkpoint unless one loaded says otherwise:
    experts and linears, but not the head, and of a MiMo model not what Xiaomi keeps BF16."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    high = _high(model)
    out = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if module is not head and name.rpartition(".")[2] not in high:
                out.add(f"{name}.weight")
        elif getattr(module, "gate_up_proj", None) is not None:
            out |= {f"{name}.{n}" for n, p in module._parameters.items() if p.dim() == 3}
    return out


def _high(model: nn.Module) -> tuple[str, ...]:
    config = getattr(model, "config", None)
    if isinstance(config, MiMoV2Config):
        return "o_proj", "eh_proj"
    return ("input_proj",) if isinstance(config, MiMoConfig) else ()


def fp32_tensors(model: nn.Module) -> set[str]:
    """Names of the model's tensors that a checkpoint keeps in FP32: the routers'."""
    return {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, Router)
        for key, _ in _own_tensors(module)
    }


def quantization_config(
    model: nn.Module, layout: str, fp8: set[str], block: tuple[int, int] = BLOCK
) -> dict:
    """The section of config.json for a file in which the tensors `fp8` are FP8.

    "released": as Xiaomi writes it, with MTP's o_proj under a name of its own and no more;
    "canonical": the key that transformers of every version reads, and all that is not FP8.
    """
    high = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.weight" not in fp8
    ]
    key = "modules_to_not_convert"
    if layout == "released":
        key = "ignored_layers"
        if isinstance(getattr(model, "config", None), MiMoV2Config):
            high = [n for n in high if n.startswith("model.layers.")]
            high += ["model.decoder.self_attn.o_proj"] if high else []
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
        key: high,
    }


def tensor_table(model: nn.Module, layout: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor that `save_fp8` writes for `model`, which may be on meta."""
    fp8, fp32 = fp8_weights(model), fp32_tensors(model)
    out = {}
    for group in groups(model, layout):
        target = group.parts[0].target
        for s in group.stored:
            if target in fp8 and s.grid is not None:
                out[s.name] = torch.float8_e4m3fn, s.shape
                out[f"{s.name}_scale_inv"] = torch.float32, s.scale_shape()
            else:
                out[s.name] = (torch.float32 if target in fp32 else torch.bfloat16), s.shape
    return out
