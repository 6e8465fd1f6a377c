"""Classes made at conversion: one of ours in front of the module's own, so that both count.

Such a class carries the module's own name, by which libraries find and save a model; it exists once
for each pair, and pickles as that pair.
"""

from __future__ import annotations

import functools


@functools.cache
def mixed_class(ours: type, plain: type) -> type:
    """A class that is `ours` before it is `plain`; `_ottava_plain_class` names the latter."""

    def reduce(self, protocol):
        _, _, *state = super(mixed, self).__reduce_ex__(protocol)
        return _new, (ours, plain), *state

    names = {k: getattr(plain, k) for k in ("__module__", "__qualname__", "__doc__")}
    body = {**names, "_ottava_plain_class": plain, "__reduce_ex__": reduce}
    mixed = type(plain.__name__, (ours, plain), body)
    return mixed


def _new(ours: type, plain: type):
    cls = mixed_class(ours, plain)
    return cls.__new__(cls)
