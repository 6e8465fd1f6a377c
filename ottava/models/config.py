"""Configurations of the MiMo family, under the keys of the released `config.json` files, and the named presets.

Three model types: `mimo_v2` (MiMo-V2.5-Pro, MiMo-V2.5 text, every proxy), `mimo_v2_flash`
(MiMo-V2-Flash), `mimo` (MiMo-7B; with other sizes, any Llama- or Qwen2-shaped dense model). A
released file is read unchanged. A key that would change the model and that we do not implement is
an error, never ignored. The model asks `config.attention(layer)` and `config.is_moe(layer)` and
nothing else, so it holds no rule of thumb about which layer is what.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers import GenerationConfig, PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of one layer. `window`: keys visible including the query's own; None is all."""

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    rotary_dim: int
    theta: float
    window: int | None
    sinks: bool
    value_scale: float
    qkv_bias: bool
    fused: bool


# MiMo-V2.5-Pro's layers: 0 attends to everything, 1 to a window. Irregular: listed, not computed.
PRO_PATTERN = [0, *[1] * 6] + [0, *[1] * 7] * 6 + [0, *[1] * 6] * 2 + [0]

# Keys that carry no meaning for the text model: bookkeeping of the library, other modalities.
_BOOKKEEPING = {
    "architectures", "auto_map", "model_type", "name_or_path", "torch_dtype", "transformers_version",
    "quantization_config", "processor_config", "num_labels", "output_attentions", "attn_implementation",
    "experts_implementation", "per_layer_config", "use_bfloat16", "torchscript", "pruned_heads",
    "tie_encoder_decoder", "cross_attention_hidden_size", "problem_type", "finetuning_task",
    "task_specific_params", "tokenizer_class", "prefix", "bos_token_id", "eos_token_id",
    "pad_token_id", "sep_token_id", "decoder_start_token_id", "return_dict_in_generate",
}  # fmt: skip
_OTHER_MODALITIES = ("audio_", "video_", "vision_", "image_", "speech_", "mm_")


def _nearest(key: str, names) -> str:
    near = difflib.get_close_matches(key, sorted(names), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _reject_unknown(config: PretrainedConfig, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for a key that neither the model nor the library reads."""
    known = {f.name for f in fields(config)} | set(config.attribute_map)
    accepted = known | _BOOKKEEPING | set(GenerationConfig().to_dict())
    for key in kwargs:
        if key in accepted or key.startswith(("_", *_OTHER_MODALITIES)):
            continue
        raise ValueError(f"{config.model_type} config: unknown key {key!r}{_nearest(key, known)}")


def _require(config: PretrainedConfig, **allowed: tuple) -> None:
    """Raise ValueError where a key asks for something this family's code does not do."""
    for key, values in allowed.items():
        if getattr(config, key) not in values:
            raise ValueError(
                f"{config.model_type} config: {key}={getattr(config, key)!r} is not implemented; "
                f"it must be {' or '.join(map(repr, values))}"
            )


def _check_rope(config: PretrainedConfig, scaling: dict | None) -> None:
    """Accept a rope section that says what the plain keys say; raise ValueError for any other."""
    if not scaling:
        return
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{config.model_type} config: rope_type {kind!r} is not implemented")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            setattr(config, key, scaling[key])


class MiMoV2Config(PretrainedConfig):
    """MiMo-V2.5-Pro, MiMo-V2.5 (text) and the proxies, under the released keys.

    Not in the released file: `num_nextn_predict_layers` (MTP blocks; 0), `mtp_loss_weight`,
    `sequence_loss_weight` (alpha of the sequence balance loss; 0 is off).
    """

    model_type: ClassVar[str] = "mimo_v2"
    attribute_map: ClassVar[dict[str, str]] = {
        "rms_norm_eps": "layernorm_epsilon",
        "num_local_experts": "n_routed_experts",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    vocab_size: int = 152576
    hidden_size: int = 6144
    intermediate_size: int = 16384
    num_hidden_layers: int = 70
    num_attention_heads: int = 128
    num_key_value_heads: int = 8
    head_dim: int = 192
    v_head_dim: int = 128
    swa_num_attention_heads: int | None = None
    swa_num_key_value_heads: int | None = None
    swa_head_dim: int | None = None
    swa_v_head_dim: int | None = None
    hybrid_layer_pattern: list[int] | None = None
    hybrid_block_size: int | None = None
    sliding_window: int | None = None
    sliding_window_size: int | None = None
    attention_chunk_size: int | None = None
    add_full_attention_sink_bias: bool = False
    add_swa_attention_sink_bias: bool = True
    attention_value_scale: float | None = None
    attention_projection_layout: str = "fused_qkv"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    partial_rotary_factor: float = 0.334
    rope_theta: float = 10_000_000.0
    swa_rope_theta: float = 10_000.0
    moe_layer_freq: list[int] | None = None
    moe_intermediate_size: int = 2048
    n_routed_experts: int | None = 384
    num_experts_per_tok: int = 8
    n_shared_experts: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float | None = None
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    moe_router_dtype: str = "float32"
    hidden_act: str = "silu"
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1_048_576
    tie_word_embeddings: bool = False
    use_cache: bool = True
    num_nextn_predict_layers: int = 0
    mtp_loss_weight: float = 0.3
    sequence_loss_weight: float = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        _check_rope(self, kwargs.pop("rope_scaling", None))
        self._read_library_spelling(kwargs)
        _reject_unknown(self, kwargs)
        layers = self.num_hidden_layers
        if self.hybrid_layer_pattern is None:
            self.hybrid_layer_pattern = self._default_pattern()
        if self.moe_layer_freq is None:
            self.moe_layer_freq = [0] + [1] * (layers - 1)
        for key in ("hybrid_layer_pattern", "moe_layer_freq"):
            if len(getattr(self, key)) != layers or set(getattr(self, key)) - {0, 1}:
                raise ValueError(
                    f"{self.model_type} config: {key} must hold {layers} entries of 0 or 1 "
                    f"(num_hidden_layers); it is {getattr(self, key)}"
                )
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
            if getattr(self, f"swa_{key}") is None:
                setattr(self, f"swa_{key}", getattr(self, key))
        self._resolve_window()
        _require(
            self,
            scoring_func=("sigmoid",), topk_method=("noaux_tc",), hidden_act=("silu",), n_group=(1,),
            topk_group=(1,), n_shared_experts=(None, 0), attention_dropout=(0.0,),
            hybrid_block_size=(None,), moe_router_dtype=("float32",),
            attention_projection_layout=("fused_qkv", "split"),
        )  # fmt: skip
        super().__post_init__(**kwargs)

    def _default_pattern(self) -> list[int]:
        if self.num_hidden_layers != len(PRO_PATTERN):
            raise ValueError("mimo_v2 config: hybrid_layer_pattern is missing (0 full, 1 window)")
        return list(PRO_PATTERN)

    def _read_library_spelling(self, kwargs: dict[str, Any]) -> None:
        """Take layer_types / mlp_layer_types / rope_parameters as transformers spells them."""
        if (types := kwargs.pop("layer_types", None)) is not None:
            self.hybrid_layer_pattern = [int(t == "sliding_attention") for t in types]
        if (types := kwargs.pop("mlp_layer_types", None)) is not None:
            self.moe_layer_freq = [int(t == "sparse") for t in types]
        rope = kwargs.pop("rope_parameters", None) or {}
        _check_rope(self, rope.get("full_attention", rope))
        if "sliding_attention" in rope:
            self.swa_rope_theta = rope["sliding_attention"]["rope_theta"]

    def _resolve_window(self) -> None:
        if self.sliding_window is None:
            self.sliding_window = self.sliding_window_size
        if self.sliding_window is None:
            self.sliding_window = 128
        if self.sliding_window_size is None:
            self.sliding_window_size = self.sliding_window
        if self.sliding_window != self.sliding_window_size:
            raise ValueError(
                f"{self.model_type} config: sliding_window={self.sliding_window} and "
                f"sliding_window_size={self.sliding_window_size} differ; set both"
            )

    @property
    def layer_types(self) -> list[str]:
        """What the library's caches read: the attention kind of each layer."""
        names = ("full_attention", "sliding_attention")
        return [names[kind] for kind in self.hybrid_layer_pattern]

    def attention(self, layer: int | None) -> Attention:
        """The attention of `layer`; None is an MTP block's (a window layer)."""
        swa = layer is None or bool(self.hybrid_layer_pattern[layer])
        prefix = "swa_" if swa else ""
        qk_dim = getattr(self, prefix + "head_dim")
        scale = self.attention_value_scale
        return Attention(
            num_heads=getattr(self, prefix + "num_attention_heads"),
            num_kv_heads=getattr(self, prefix + "num_key_value_heads"),
            qk_dim=qk_dim,
            v_dim=getattr(self, prefix + "v_head_dim"),
            rotary_dim=int(qk_dim * self.partial_rotary_factor),
            theta=self.swa_rope_theta if swa else self.rope_theta,
            window=self.sliding_window if swa else None,
            sinks=self.add_swa_attention_sink_bias if swa else self.add_full_attention_sink_bias,
            value_scale=1.0 if scale is None else scale,
            qkv_bias=self.attention_bias,
            fused=self.attention_projection_layout == "fused_qkv",
        )

    def is_moe(self, layer: int | None) -> bool:
        """Whether `layer` routes to experts; an MTP block (None) does not."""
        return layer is not None and bool(self.moe_layer_freq[layer])


class MiMoV2FlashConfig(MiMoV2Config):
    """MiMo-V2-Flash: split projections, twice the KV heads on window layers."""

    model_type: ClassVar[str] = "mimo_v2_flash"

    hidden_size: int = 4096
    num_hidden_layers: int = 48
    num_attention_heads: int = 64
    num_key_value_heads: int = 4
    swa_num_key_value_heads: int | None = None
    attention_value_scale: float | None = 0.707
    attention_projection_layout: str = "split"
    rope_theta: float = 5_000_000.0
    n_routed_experts: int | None = 256
    max_position_embeddings: int = 262_144

    def __post_init__(self, **kwargs):
        if self.swa_num_key_value_heads is None:  # the released shape; Pro's is another
            self.swa_num_key_value_heads = 2 * self.num_key_value_heads
        super().__post_init__(**kwargs)

    def _default_pattern(self) -> list[int]:
        return [int(i > 0 and (i + 1) % 6 != 0) for i in range(self.num_hidden_layers)]


class MiMoConfig(PretrainedConfig):
    """MiMo-7B, and any dense Llama- or Qwen2-shaped model. `attention_bias`: bias of q, k, v."""

    model_type: ClassVar[str] = "mimo"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    vocab_size: int = 151680
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    attention_bias: bool = True
    attention_dropout: float = 0.0
    rope_theta: float = 640_000.0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    use_cache: bool = True
    use_mrope: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int | None = None
    num_nextn_predict_layers: int = 0
    mtp_loss_weight: float = 0.3
    sequence_loss_weight: float = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        _check_rope(self, kwargs.pop("rope_scaling", None))
        _check_rope(self, kwargs.pop("rope_parameters", None))
        kwargs.pop("layer_types", None)
        _reject_unknown(self, kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        _require(
            self,
            hidden_act=("silu",), use_sliding_window=(False,), use_mrope=(False,),
            attention_dropout=(0.0,), sequence_loss_weight=(0.0,),
        )  # fmt: skip
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """What the library's caches read: every layer attends to everything before it."""
        return ["full_attention"] * self.num_hidden_layers

    def attention(self, layer: int | None) -> Attention:
        """The attention of every layer and MTP block."""
        return Attention(
            num_heads=self.num_attention_heads, num_kv_heads=self.num_key_value_heads,
            qk_dim=self.head_dim, v_dim=self.head_dim, rotary_dim=self.head_dim,
            theta=self.rope_theta, window=None, sinks=False, value_scale=1.0,
            qkv_bias=self.attention_bias, fused=False,
        )  # fmt: skip

    def is_moe(self, layer: int | None) -> bool:
        """No layer of a dense model routes."""
        return False
