"""A stand-in for Transformer Engine 2.20.2, for machines without a GPU.

It has what layers/te.py touches, under the real names and signatures (tests/test_te_real.py compares
them), and computes on any device with plain casts. Behaviour that Ottava relies on is the real one:
unknown options of recipes vanish, regions nest, histories move when a region ends and in the backward
of its first module, and sizes that FP8 refuses raise.
"""
