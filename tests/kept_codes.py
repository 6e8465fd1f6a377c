"""Which casts of weights outlive the forward that made them: for tests of sharded strategies."""

from torch.multiprocessing.reductions import StorageWeakRef

from ottava.kernels import cast


def kept_after_forward(trainer, shapes):
    """(casts of something of one of `shapes` in a step's forward, those alive when it has ended)."""
    made, real = [], cast.quantize
    backward = trainer.strategy.backward
    counts = []

    def noted(x, *args, **kwargs):
        out = real(x, *args, **kwargs)
        if tuple(x.shape) in shapes:
            made.append(StorageWeakRef(out.codes.untyped_storage()))
        return out

    def looked(loss, *, last):
        counts.append((len(made), sum(not ref.expired() for ref in made)))
        backward(loss, last=last)

    cast.quantize, trainer.strategy.backward = noted, looked
    try:
        trainer.step_once()
    finally:
        cast.quantize, trainer.strategy.backward = real, backward
    return counts[0]


def shapes_of(model):
    """The shapes of linears' weights, of experts' in the forms in which they are cast, transposed too."""
    shapes = set()
    for p in model.parameters():
        shape = tuple(getattr(p, "ds_shape", p.shape))
        if len(shape) == 3:
            shapes |= {shape[1:], (shape[0] * shape[1], shape[2])}
        elif len(shape) == 2:
            shapes.add(shape)
    return shapes | {s[::-1] for s in shapes}
