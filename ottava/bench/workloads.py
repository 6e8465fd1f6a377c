"""Named workloads for speed and memory, the same in every comparison, and what a step must cost.

Random tokens: speed and memory do not depend on them. Loss needs real text and a run file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Data, Model, Monitor, Optimizer, Precision, Run, Train
from ..models.presets import preset_config


@dataclass(frozen=True)
class Workload:
    """A model preset and the tokens of one step: `batch` sequences of `length`."""

    name: str
    model: str
    batch: int
    length: int
    summary: str

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.length

    def run(
        self, preset: str, *, steps: int, recompute: str = "none", seed: int = 0,
        graph: str = "auto", recipe: str = "preset",
    ) -> Run:  # fmt: skip
        """The run of this workload under a preset: AdamW, constant lr 1e-4, no clipping."""
        return Run(
            name=f"{self.name}-{preset}",
            seed=seed,
            device="cuda",
            model=Model(name=self.model),
            data=Data(source="random", sequence_length=self.length, document_mask=False),
            train=Train(
                preset=preset, steps=steps, micro_batch=self.batch, recompute=recompute,
                eval_batches=0, resume="never", graph=graph,
            ),
            optimizer=Optimizer(lr=1e-4, schedule="constant"),
            precision=Precision(recipe=recipe),
            monitor=Monitor(every=0),  # nobody looks into steps that are timed
        ).check()  # fmt: skip


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "dense-w1", 8, 2048, "1.47 B dense, Llama-shaped, 20 layers of 2048"),
        Workload("W2", "dense-w2", 4, 4096, "2.21 B dense, Llama-shaped, 8 layers of 4096"),
        Workload("W3", "mimo-v2-base", 4, 4096, "2.89 B MiMo-V2 proxy, 64 experts, top-8"),
        Workload(
            "W4", "pro-6L-E32", 1, 4096, "10.5 B, MiMo-V2.5-Pro's width, 6 layers, 32 experts"
        ),
        Workload("tiny", "mimo-v2-tiny", 4, 4096, "0.48 B MiMo-V2 proxy, 48 experts, top-8"),
        Workload("base", "mimo-v2-base", 4, 4096, "2.89 B MiMo-V2 proxy, 64 experts, top-8"),
    )
}

# Measured on one H200: TFLOP/s of the GEMMs, TB/s of a mix of elementwise kernels.
FP8_FORWARD, FP8_BACKWARD, BF16_GEMM, ATTENTION = 1260e12, 1180e12, 680e12, 500e12
ELEMENTWISE = 3.5e12
ELEMENTWISE_BYTES = 160  # per token, layer and hidden element: a fused step's reads and writes
OPTIMIZER_BYTES = 10  # per parameter: codes, residual, two 8-bit moments both ways, gradient


def counted_floor(workload: Workload) -> float | None:
    """Tokens/s that an H200 cannot exceed with FP8 blocks and a BF16 head; None for MoE models.

    Counted, not measured: GEMMs at measured rates, causal attention, elementwise traffic, AdamW.
    """
    config = preset_config(workload.model)
    if config.model_type != "mimo":
        return None
    h, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv = config.num_key_value_heads * (h // config.num_attention_heads)
    block = layers * (2 * h * h + 2 * h * kv + 3 * h * f)
    head = config.vocab_size * h
    tokens = workload.tokens
    seconds = tokens * block * (2 / FP8_FORWARD + 4 / FP8_BACKWARD) + 6 * tokens * head / BF16_GEMM
    seconds += 3.5 * 2 * workload.length * h * layers * tokens / ATTENTION
    seconds += ELEMENTWISE_BYTES * h * layers * tokens / ELEMENTWISE
    seconds += OPTIMIZER_BYTES * (block + 2 * head) / ELEMENTWISE
    return tokens / seconds
