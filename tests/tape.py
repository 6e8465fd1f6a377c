"""A stand-in for a CUDA graph on the CPU: every operator that a step calls is written down with its
arguments, and called again with the same ones; results go to where the first ones were.

As in a real capture nothing has happened when it ends, numbers from the host are frozen, and looking
at a value or bringing one from the host is an error.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOKS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh"}


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if name in LOOKS:
            raise RuntimeError(f"{name}: not permitted when stream is capturing")
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.made and storage._cdata not in self.before:
                    self.before[storage._cdata] = storage, storage.clone()
        out = func(*args, **kwargs)
        returns = zip(func._schema.returns, out if isinstance(out, tuple) else [out], strict=False)
        fresh = []
        for spec, values in returns:
            for value in tree_leaves(values):
                if isinstance(value, torch.Tensor) and spec.alias_info is None:
                    fresh.append(value)
                    self.made.add(value.untyped_storage()._cdata)
        self.calls.append((func, args, kwargs, out, fresh))
        return out

    def undo(self):
        for storage, content in self.before.values():
            storage.copy_(content)

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out, fresh in self.calls:
            again = func(*args, **kwargs)
            if fresh:
                kept = {id(t) for t in fresh}
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if id(old) in kept:
                        old.copy_(new)


class TapeLane:
    """train/graph.py's Lane on the CPU. `captures` counts; `fail` makes the next one fail."""

    def __init__(self, device="cpu"):
        self.device, self.captures, self.fail, self.renewed = torch.device(device), 0, False, 0

    @contextlib.contextmanager
    def entered(self):
        yield

    def synchronize(self):
        pass

    def renew(self):
        self.renewed += 1

    def capture(self, step):
        tape = Tape()
        try:
            with tape:
                out = step()
                if self.fail:
                    raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            tape.undo()
        self.captures += 1
        return tape, out
