"""Puts the stand-in for Transformer Engine (tests/fake_te) in its place, and takes it away again."""

import pathlib
import sys
from contextlib import contextmanager

from ottava.layers import te

FAKE = str(pathlib.Path(__file__).parent / "fake_te")


def forget():
    """As in a process that has imported none."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    te.built.cache_clear()


@contextmanager
def in_place(monkeypatch):
    """Importable, and on CPUs; gives its quantization module, with `products` of module.py."""
    forget()
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(te, "DEVICES", ("cuda", "cpu"))
    from transformer_engine.pytorch import module, quantization

    quantization.products = module.PRODUCTS
    try:
        yield quantization
    finally:
        forget()
