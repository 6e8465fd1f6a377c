"""The MiMo models in plain PyTorch, under Hugging Face conventions; no 8-bit code here.

Three families share one decoder: `MiMoV2ForCausalLM` (Pro, V2.5 text, proxies),
`MiMoV2FlashForCausalLM`, `MiMoForCausalLM` (dense). Parameters carry the released names, except
that qkv rows are [Q | K | V] and the experts of a layer are two 3-D parameters. Nothing depends on
a buffer that a meta-device build would leave unset.

B batch, T tokens, h hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .attention_core import AttentionCore, rotary_tables
from .blocks import MLP, DecoderLayer, RMSNorm, SelfAttention
from .config import MiMoConfig, MiMoV2Config, MiMoV2FlashConfig
from .moe import Experts, MoE, Router, freeze_router, load_statistics, update_router_bias
from .mtp import DenseMTPBlock, MTPBlock, MTPBlocks, mtp_labels, shift_left

__all__ = [
    "MLP", "AttentionCore", "DecoderLayer", "DenseMTPBlock", "Experts", "MTPBlock",
    "MiMoForCausalLM", "MiMoModel", "MiMoOutput", "MiMoPreTrainedModel", "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM", "MoE", "RMSNorm", "Router", "SelfAttention", "freeze_router",
    "load_statistics", "update_router_bias",
]  # fmt: skip

# The library renamed `past_key_values` to `cache`; `generate` reads what its version writes.
_RENAMED = "cache" in {f.name for f in fields(CausalLMOutputWithPast)}
CACHE_NAME = "cache" if _RENAMED else "past_key_values"


@dataclass
class MiMoOutput(CausalLMOutputWithPast):
    """`loss` is the whole loss; `mtp_loss` (the blocks' mean, not yet weighted) and `aux_loss` (the
    sequence balance loss, weighted) are parts of it."""

    mtp_loss: Tensor | None = None
    aux_loss: Tensor | None = None


class MiMoPreTrainedModel(PreTrainedModel):
    """What the three families share with the library."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer", "MTPBlock", "DenseMTPBlock"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["e_score_correction_bias", "mlp.gate.weight"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        for parameter in own_parameters(module):
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.normal_(0.0, self.config.initializer_range)
        if isinstance(module, Router):
            bias = module.e_score_correction_bias
            if not getattr(bias, "_is_hf_initialized", False):
                bias.zero_()


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The N(0, initializer_range) parameters of one module that the library would not initialise."""
    if isinstance(module, Router):
        return [module.weight]
    if isinstance(module, Experts):
        return [module.gate_up_proj, module.down_proj]
    if isinstance(module, SelfAttention) and module.attention_sink_bias is not None:
        return [module.attention_sink_bias]
    return []


class MiMoModel(MiMoPreTrainedModel):
    """Embedding, decoder layers, final norm, and the MTP blocks where the configuration has any."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        if config.num_nextn_predict_layers and config.model_type == "mimo":
            blocks = (DenseMTPBlock(config) for _ in range(config.num_nextn_predict_layers))
            self.mtp_layers = nn.ModuleList(blocks)
        elif config.num_nextn_predict_layers:
            self.mtp = MTPBlocks(config)
        self.post_init()

    @property
    def mtp_blocks(self) -> nn.ModuleList | list:
        """The MTP blocks in order; empty without any."""
        if hasattr(self, "mtp"):
            return self.mtp.layers
        return getattr(self, "mtp_layers", [])

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        documents: Tensor | None = None,
        cache: DynamicCache | None = None,
        output_hidden_states: bool | None = None,
        **rest,
    ) -> BaseModelOutputWithPast:
        """Token ids [B, T] -> last_hidden_state [B, T, h], after the final norm.

        `documents` [B, T] int: a token sees only its own document. `attention_mask` [B, past + T]:
        0 marks padding. Raises ValueError for neither or both of ids and embeddings, for a mask that
        is not two-dimensional, and for an argument that asks for what is not done here.
        """
        _refuse(rest)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past = 0 if cache is None else cache.get_seq_length()
        documents = _documents(documents, attention_mask)
        tables = self.rotary_tables(x.shape[1], past, position_ids, x.device)
        states = [x] if output_hidden_states else []
        for layer in self.layers:
            x = layer(x, tables[layer.self_attn.rotary], documents, cache)
            if output_hidden_states:
                states.append(x)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*states[:-1], x) if output_hidden_states else None,
            **{CACHE_NAME: cache if use_cache else None},
        )

    def rotary_tables(
        self, length: int, past: int, position_ids: Tensor | None, device: torch.device
    ) -> dict[tuple[int, float], tuple[Tensor, Tensor]]:
        """(cos, sin) of each (rotary width, theta) in use: [T, R], or [B, T, R] where rows differ."""
        if position_ids is None:
            positions = torch.arange(past, past + length, device=device)
        else:
            positions = position_ids[0] if position_ids.shape[0] == 1 else position_ids
        kinds = {m.self_attn.rotary for m in (*self.layers, *self.mtp_blocks)}
        return {kind: rotary_tables(positions, *kind) for kind in sorted(kinds)}

    def mtp_states(
        self, state_BTh: Tensor, input_ids: Tensor, documents: Tensor | None = None
    ) -> list[Tensor]:
        """What the head reads for each MTP block, [B, T, h]; `mtp_labels` gives the targets.

        `state_BTh` is last_hidden_state. Past the end of the sequence the last token stands in;
        the labels mask those positions.
        """
        if not len(self.mtp_blocks):
            return []
        tables = self.rotary_tables(input_ids.shape[1], 0, None, state_BTh.device)
        out = []
        for k, block in enumerate(self.mtp_blocks):
            steps = min(1 + k, input_ids.shape[1])
            token = self.embed_tokens(shift_left(input_ids, steps, 0))
            out.append(block(state_BTh, token, tables[block.self_attn.rotary], documents))
        return out

    def take_sequence_loss(self) -> Tensor | None:
        """The weighted sequence balance loss of the forward just run; clears it. None when off."""
        total = None
        for module in self.modules():
            if isinstance(module, Router) and module.sequence_loss is not None:
                loss, module.sequence_loss = module.sequence_loss, None
                total = loss if total is None else total + loss
        return total


def _refuse(arguments: dict) -> None:
    """ValueError for an argument that would be ignored: any that transformers knows and this model
    does not, unless its value asks for nothing (None, False) or for what is done (return_dict)."""
    for name, value in arguments.items():
        idle = value is True if name == "return_dict" else value is False
        if value is not None and not idle:
            raise ValueError(f"MiMo: the argument {name} is not known here; leave it out")


def _documents(documents: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """Documents with padding as a document of its own (-1); None when all tokens are one."""
    if attention_mask is None:
        return documents
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be [batch, keys] with 0 for padding; got {attention_mask.dim()} "
            "dimensions (static caches are not supported)"
        )
    if bool(attention_mask.all()):
        return documents
    if documents is None:
        return attention_mask.to(torch.int32) - 1
    return documents.masked_fill(attention_mask == 0, -1)


class MiMoV2ForCausalLM(MiMoPreTrainedModel, GenerationMixin):
    """MiMo-V2 with its language-model head."""

    config_class = MiMoV2Config
    router_aux_loss_coef = 1.0  # `aux_loss` comes weighted
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config) -> None:
        super().__init__(config)
        self.model = MiMoModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        documents: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> MiMoOutput:
        """Logits [B, T, V], and the loss where labels [B, T] are given (the shift is done here).

        The loss is the mean next-token cross-entropy (the sum over `num_items_in_batch` if given),
        plus the MTP blocks' mean times `mtp_loss_weight`, plus the sequence loss. -100 is ignored.
        """
        decoded = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache,
            documents, **kwargs,
        )  # fmt: skip
        state = decoded.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        outputs = MiMoOutput(
            hidden_states=decoded.hidden_states, **{CACHE_NAME: decoded.get(CACHE_NAME)}
        )
        if labels is None:
            outputs.logits = self.lm_head(state[:, keep])
        else:
            target = shift_left(labels, 1, -100)
            outputs.logits, outputs.loss = self.token_loss(
                state[:, keep], target, num_items_in_batch
            )
        if self.training:
            outputs.aux_loss = self.model.take_sequence_loss()
            if len(self.model.mtp_blocks):
                outputs.mtp_loss = self._mtp_loss(
                    state, input_ids, labels, documents, num_items_in_batch
                )
        if labels is not None:
            if outputs.mtp_loss is not None:
                outputs.loss = outputs.loss + self.config.mtp_loss_weight * outputs.mtp_loss
            if outputs.aux_loss is not None:
                outputs.loss = outputs.loss + outputs.aux_loss
        return outputs

    def token_loss(
        self, state_BTh: Tensor, target_BT: Tensor, count: Tensor | int | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """(logits, loss) of the head on `state_BTh`, targets already shifted. Every loss of this
        model comes from here: a head that works in chunks replaces it and gives no logits."""
        logits = self.lm_head(state_BTh)
        return logits, _cross_entropy(logits, target_BT, count)

    def _mtp_loss(self, state, input_ids, labels, documents, count) -> Tensor:
        """Mean over the MTP blocks of their cross-entropy through the shared head."""
        if labels is None or input_ids is None:
            raise ValueError(
                "MTP blocks train from input_ids and labels of the same forward; give both, or set "
                "num_nextn_predict_layers=0"
            )
        states = self.model.mtp_states(state, input_ids, documents)
        losses = [
            self.token_loss(h, mtp_labels(labels, k, documents), count)[1]
            for k, h in enumerate(states)
        ]
        return torch.stack(losses).mean()


def _cross_entropy(logits_BTV: Tensor, target_BT: Tensor, count: Tensor | int | None) -> Tensor:
    """FP32 cross-entropy of shifted targets: mean over valid ones, or sum over `count`."""
    logits, target = logits_BTV.flatten(0, 1).float(), target_BT.flatten().to(logits_BTV.device)
    total = F.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
    return total / ((target != -100).sum().clamp_min(1) if count is None else count)


class MiMoV2FlashForCausalLM(MiMoV2ForCausalLM):
    """MiMo-V2-Flash."""

    config_class = MiMoV2FlashConfig


class MiMoForCausalLM(MiMoV2ForCausalLM):
    """MiMo-7B, and dense Llama- or Qwen2-shaped models."""

    config_class = MiMoConfig


MODELS = {
    c.config_class.model_type: c
    for c in (MiMoV2ForCausalLM, MiMoV2FlashForCausalLM, MiMoForCausalLM)
}
for _cls in (MiMoV2ForCausalLM, MiMoForCausalLM):
    AutoConfig.register(_cls.config_class.model_type, _cls.config_class)
    AutoModelForCausalLM.register(_cls.config_class, _cls)
