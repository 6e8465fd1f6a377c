"""A MiMo-V2 with every mechanism at odd sizes, for the tests of the model and of its conversion."""

import torch
import torch.utils._device

from ottava.models.config import MiMoV2Config
from ottava.models.mimo import MiMoV2ForCausalLM, Router

# Cached at first use: filled before a test replaces torch.empty, so that torch.device("meta") works.
torch.utils._device._device_constructors()

# Pro's mechanisms at odd sizes: unequal head widths, KV heads by layer kind, every number distinct.
TOY = {
    "hidden_size": 20, "num_hidden_layers": 4, "vocab_size": 31, "num_attention_heads": 6,
    "num_key_value_heads": 2, "swa_num_key_value_heads": 3, "head_dim": 24, "v_head_dim": 16,
    "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "sliding_window": 5,
    "intermediate_size": 28, "moe_intermediate_size": 12, "n_routed_experts": 7,
    "num_experts_per_tok": 3, "routed_scaling_factor": 1.3, "attention_value_scale": 0.612,
    "rope_theta": 1e4, "swa_rope_theta": 100.0, "initializer_range": 0.3,
}  # fmt: skip


def toy(**overrides):
    """A MiMo-V2 in FP32 with large weights and correction biases that change the selection."""
    config = MiMoV2Config(**{**TOY, **overrides})
    model = MiMoV2ForCausalLM(config).train()
    for module in model.modules():
        if isinstance(module, Router):
            module.e_score_correction_bias.normal_(0, 0.2)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.normal_(1, 0.2)
    return model


def worst(a, b):
    """Largest difference relative to the largest entry."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
