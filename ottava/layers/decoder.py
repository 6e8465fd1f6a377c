"""A decoder layer whose two residual sums run inside the norms that read them.

    h  = x + attention(norm1(x))
    x' = h + mlp(norm2(h))

`summed` (layers/norm.py) makes each sum together with the norm that reads it, also the last one
with the first norm of the next layer, and adds the stream's gradients inside the norms' backward.
All values are those of the plain layer; hooks on any module, recorded hidden states and layers
that run again in backward see the same tensors as before.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

from .mixed import mixed_class
from .norm import summed
from .waiting import may_wait, region


class Block:
    """Mixed in before the class of a decoder layer (ours or transformers'), whose modules it calls:
    input_layernorm, self_attn, post_attention_layernorm, mlp. `next_norm`: what reads the output."""

    _ottava_plain_class: type
    next_norm: nn.Module | None = None

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        first, second = self.input_layernorm, self.post_attention_layernorm
        x = summed(first, x)
        h = summed(second, self.self_attn(first(x), *args, **kwargs), x)
        return summed(self._reader(), self.mlp(second(h)), h)

    def _reader(self) -> nn.Module | None:
        """The norm of the next layer, where that layer can use what is made here: a stretch that
        runs again in backward makes everything itself."""
        if not may_wait():
            return None
        again = getattr(self, "gradient_checkpointing", False) and self.training
        return None if again or region() is not None else self.next_norm


class TransformersBlock(Block):
    """transformers' layers: keywords for the attention, which returns its weights as well."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args:
            kwargs |= dict(zip(_names(self._ottava_plain_class), args, strict=False))
        first, second = self.input_layernorm, self.post_attention_layernorm
        x = summed(first, hidden_states)
        h = summed(second, self.self_attn(hidden_states=first(x), **kwargs)[0], x)
        return summed(self._reader(), self.mlp(second(h)), h)


@functools.cache
def _names(cls: type) -> list[str]:
    """Names of the arguments after the hidden states."""
    return list(inspect.signature(cls.forward).parameters)[2:]


def block_class(cls: type) -> type:
    """`cls` with a block mixed in."""
    ours = TransformersBlock if cls.__module__.startswith("transformers.") else Block
    return mixed_class(ours, cls)


def link_blocks(modules: dict[str, nn.Module]) -> None:
    """Tell each block of a list of layers which norm reads its output: the next block's first, or
    the `norm` beside the list for the last."""
    for name, layers in modules.items():
        if not isinstance(layers, nn.ModuleList):
            continue
        owner = modules[name.rpartition(".")[0]]
        readers = [getattr(m, "input_layernorm", None) for m in list(layers)[1:]]
        readers.append(getattr(owner, "norm", None))
        for layer, reader in zip(layers, readers, strict=True):
            if isinstance(layer, Block):
                layer.__dict__["next_norm"] = reader
