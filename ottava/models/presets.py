"""Named models: the released MiMo models, proxies that keep every mechanism, dense benchmark shapes."""

from __future__ import annotations

import difflib
from typing import Any

from transformers import PretrainedConfig

from .config import PRO_PATTERN, MiMoConfig, MiMoV2Config, MiMoV2FlashConfig

_PROXY_BLOCK = [0, *[1] * 6]


def _proxy(hidden, layers, heads, kv, experts, moe, dense, vocab, **more) -> tuple[type, dict]:
    """A scaled-down MiMo-V2: Pro's head sizes, window, sinks, router; value scale by its formula."""
    pattern = [*(_PROXY_BLOCK * 3)[: layers - 1], 0]
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "n_routed_experts": experts, "moe_intermediate_size": moe,
        "intermediate_size": dense, "vocab_size": vocab, "hybrid_layer_pattern": pattern,
        "attention_value_scale": round((hidden / (heads * 128)) ** 0.5, 6),
    }  # fmt: skip
    return MiMoV2Config, {**sizes, **more}


def _dense(hidden, layers, heads, kv, mlp, vocab, **more) -> tuple[type, dict]:
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": mlp, "vocab_size": vocab, "attention_bias": False,
        "rope_theta": 10_000.0, "max_position_embeddings": 32_768,
    }  # fmt: skip
    return MiMoConfig, {**sizes, **more}


_QWEN = {"attention_bias": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_DEMO = {
    "head_dim": 48, "v_head_dim": 32, "swa_num_key_value_heads": 2, "sliding_window": 16, "num_experts_per_tok": 2,
    "hybrid_layer_pattern": [0, 1, 1, 1, 0], "attention_value_scale": 0.707, "max_position_embeddings": 4096,
}  # fmt: skip

PRESETS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "mimo-v2.5-pro": (
        MiMoV2Config,
        {
            "num_hidden_layers": 70,
            "hybrid_layer_pattern": PRO_PATTERN,
            "attention_value_scale": 0.612,
        },
    ),
    "mimo-v2.5": (
        MiMoV2Config,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "swa_num_key_value_heads": 8,
            "n_routed_experts": 256,
            "attention_value_scale": 0.707,
            "hybrid_layer_pattern": [int(i > 0 and (i + 1) % 6 != 0) for i in range(48)],
        },
    ),
    "mimo-v2-flash": (MiMoV2FlashConfig, {"num_hidden_layers": 48}),
    "mimo-7b": (MiMoConfig, {}),
    # hidden, layers, heads, KV heads, experts, expert width, dense width, vocabulary
    "demo": _proxy(128, 5, 4, 1, 8, 128, 256, 272, **_DEMO),
    "mimo-v2-nano": _proxy(512, 8, 8, 1, 32, 256, 1536, 32_768),
    "mimo-v2-tiny": _proxy(768, 8, 16, 1, 48, 256, 2048, 152_576),
    "mimo-v2-small": _proxy(1024, 15, 16, 1, 64, 384, 3072, 152_576),
    "mimo-v2-base": _proxy(1536, 15, 32, 2, 64, 512, 4096, 152_576),
    "mimo-v2-mid": _proxy(2048, 15, 32, 2, 96, 768, 6144, 152_576),
    "mimo-v2-large": _proxy(3072, 15, 64, 4, 128, 1024, 8192, 152_576),
    "pro-8L-E32": _proxy(6144, 8, 128, 8, 32, 2048, 16_384, 152_576),
    "pro-8L-E128": _proxy(6144, 8, 128, 8, 128, 2048, 16_384, 152_576),
    # layers 0-5 of Pro with 32 experts: the W4 workload
    "pro-6L-E32": _proxy(
        6144, 6, 128, 8, 32, 2048, 16_384, 152_576, hybrid_layer_pattern=PRO_PATTERN[:6]
    ),
    # hidden, layers, heads, KV heads, MLP width, vocabulary
    "dense-w1": _dense(2048, 20, 16, 16, 8192, 32_000),
    "dense-w2": _dense(4096, 8, 32, 32, 14_336, 32_000),
    "dense-100m": _dense(768, 12, 12, 12, 2048, 32_000),
    "qwen2.5-7b": _dense(3584, 28, 28, 4, 18_944, 152_064, **_QWEN),
    "qwen2.5-32b": _dense(5120, 64, 40, 8, 27_648, 152_064, **_QWEN),
}
# The proxies' short names.
ALIASES = {n.removeprefix("mimo-v2-"): n for n in PRESETS if n.startswith("mimo-v2-")}
_PER_LAYER = ("hybrid_layer_pattern", "moe_layer_freq")


def preset_config(name: str, overrides: dict[str, Any] | None = None) -> PretrainedConfig:
    """The configuration of preset `name` with config keys overridden.

    Fewer layers than the preset keep its first ones. Raises ValueError, with the nearest name, for
    an unknown preset or key.
    """
    name = ALIASES.get(name, name)
    if name not in PRESETS:
        near = difflib.get_close_matches(name, [*PRESETS, *ALIASES], 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"model: unknown name {name!r}{hint}; choose one of {', '.join(PRESETS)}")
    cls, keys = PRESETS[name]
    return cls(**merge_overrides(keys, overrides or {}))


def merge_overrides(keys: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`keys` with `overrides` on top; keys that repeat another (window, layer lists) follow it."""
    merged = {**keys, **overrides}
    layers = merged.get("num_hidden_layers")
    for key in _PER_LAYER:
        if key not in overrides and layers and len(merged.get(key) or ()) > layers:
            merged[key] = list(merged[key][:layers])
    if "sliding_window" in overrides and "sliding_window_size" not in overrides:
        merged.pop("sliding_window_size", None)
    return merged
