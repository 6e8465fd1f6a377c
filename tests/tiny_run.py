"""A run small enough for a test: a MiMo-V2 with every mechanism, about 50 thousand parameters."""

from dataclasses import replace

from ottava.config import Data, Log, Model, Optimizer, Run, Train

MODEL = {
    "hidden_size": 32, "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 0],
    "num_attention_heads": 2, "head_dim": 16, "v_head_dim": 16, "swa_num_key_value_heads": 1,
    "num_key_value_heads": 1, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "intermediate_size": 64, "sliding_window": 8,
}  # fmt: skip


def write_text(folder):
    """A text file of a few thousand bytes that compresses badly enough to be learnt from."""
    path = folder / "text.txt"
    lines = [f"line {i}: {i * i} is the square of {i}, and {i % 7} its rest" for i in range(300)]
    path.write_text("\n".join(lines))
    return path


def tiny_run(folder, preset="fp32", *, steps=6, out="run", **sections):
    """A Run in `folder`; `sections`: train={...}, optimizer={...} ... change keys of a section."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    run = Run(
        name="tiny",
        out=str(folder / out),
        device="cpu",
        model=Model(name="demo", overrides=MODEL),
        data=Data(source=str(text), sequence_length=16, validation_fraction=0.1),
        train=Train(preset=preset, steps=steps, micro_batch=2, eval_batches=2),
        optimizer=Optimizer(lr=3e-3, warmup_steps=2),
        log=Log(every=1),
    )
    for name, changes in sections.items():
        value = changes
        if isinstance(changes, dict):
            value = replace(getattr(run, name), **changes)
        run = replace(run, **{name: value})
    return run.check()
