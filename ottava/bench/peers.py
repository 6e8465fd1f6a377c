"""What a comparison on a workload runs: our presets, plain PyTorch, and other systems.

A variant builds a model and its optimizer and gives a step; everything else (process, timing,
memory) is contest.py's. Other packages are imported only by the variant that needs them, inside its
own process. Every peer trains BF16 weights with BF16 AdamW moments, as its users do to save memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import PRESETS
from ..convert import convert, plan
from ..models.load import load_model
from ..models.presets import preset_config
from ..numerics.recipe import Gemm, Recipe
from ..recompute import decoder_layers
from ..train.trainer import Trainer
from .machine import version_of
from .workloads import Workload

LR = 1e-4


@dataclass(frozen=True)
class Built:
    """A variant ready to train: `step()` trains one step and returns its loss as a number."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    step: Callable[[], float]


@dataclass(frozen=True)
class Variant:
    """`needs`: (distribution, version that it was written for). `dense`, `moe`: only for such models.

    `preset`, `recompute`, `recipe`: what our planner can say about its memory; empty for a peer.
    """

    name: str
    build: Callable[[Workload, int], Built]
    needs: tuple[tuple[str, str], ...] = ()
    dense: bool = False
    moe: bool = False
    preset: str = ""
    recompute: str = "none"
    recipe: str = "preset"

    def missing(self) -> str:
        """Which package is not installed; empty when all are."""
        absent = [name for name, _ in self.needs if version_of(name) is None]
        return f"{', '.join(absent)} not installed" if absent else ""

    def wrong_versions(self) -> list[str]:
        """A line for each package of another version than this was written for."""
        return [
            f"{name} {version_of(name)} is installed; this was written for {wanted}"
            for name, wanted in self.needs
            if version_of(name) not in (None, wanted)
        ]


def random_batches(
    workload: Workload, vocabulary: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, labels), the same tokens, on the GPU; another batch every time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        shape = (workload.batch, workload.length)
        ids = torch.randint(0, vocabulary, shape, generator=generator).cuda(non_blocking=True)
        yield ids, ids


# ---- our presets: the product's own step ----


def _ours(preset: str, recompute: str = "none", compiled: bool = False, recipe: str = "preset"):
    # The plain presets are PyTorch as one writes it: launched step by step, no CUDA graph.
    graph = "auto" if preset in ("fp8", "fp8-lean", "storage") else "off"

    def build(workload: Workload, seed: int) -> Built:
        run = workload.run(
            preset, steps=10_000, recompute=recompute, seed=seed, graph=graph, recipe=recipe
        )
        trainer = Trainer(run, device="cuda")
        if compiled:
            _compile_layers(trainer.model)
        return Built(trainer.model, trainer.optimizer, lambda: trainer.step_once().loss)

    return build


def _compile_layers(model: nn.Module) -> None:
    for layer in decoder_layers(model):
        layer.compile()


# ---- BF16 through the kernels that our presets use: grouped experts, windowed attention ----

_IN_BF16 = Recipe(
    name="bf16",
    output=Gemm(fp8=False),
    grad_input=Gemm(fp8=False),
    grad_weight=Gemm(fp8=False),
    keep="high",
)


def _grouped_bf16(workload: Workload, seed: int) -> Built:
    model = _bf16_model(workload, seed)
    made = plan(model, _IN_BF16)
    rows = [
        replace(r, recipe=_IN_BF16, plain=False) if r.kind == "attention" else r for r in made.rows
    ]
    convert(model, replace(made, rows=tuple(rows)))
    return _trained(workload, model, _adamw(model), _plain_loss, seed)


# ---- torchao, with Liger's loss and FlashAdamW ----


def _torchao(recipe: str, *, liger: bool = False, flash: bool = False):
    def build(workload: Workload, seed: int) -> Built:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = _bf16_model(workload, seed)
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name
        )
        _compile_layers(model)
        if flash:
            from flashoptim import FlashAdamW, enable_gradient_release

            optimizer = FlashAdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
            enable_gradient_release(model, optimizer)
        else:
            optimizer = _adamw(model)
        loss_of = _liger_loss() if liger else _plain_loss
        return _trained(workload, model, optimizer, loss_of, seed)

    return build


def _bf16_model(workload: Workload, seed: int) -> nn.Module:
    return load_model(workload.model, dtype=torch.bfloat16, device="cuda", seed=seed)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def _plain_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels, use_cache=False).loss


def _liger_loss():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()

    def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        return loss(model.lm_head.weight, hidden.flatten(0, 1), targets.flatten())

    return loss_of


def _trained(workload: Workload, model: nn.Module, optimizer, loss_of, seed: int) -> Built:
    batches = random_batches(workload, model.config.vocab_size, seed)

    def step() -> float:
        ids, labels = next(batches)
        loss = loss_of(model, ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Built(model, optimizer, step)


# ---- Transformer Engine ----


class _TeModel(nn.Module):
    """The dense workload of Transformer Engine's own layers, in BF16."""

    def __init__(self, config) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.attention import RotaryPositionEmbedding

        super().__init__()
        self.config = config
        width, where = config.hidden_size, {"device": "cuda", "dtype": torch.bfloat16}
        self.embed_tokens = nn.Embedding(config.vocab_size, width, **where)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                width,
                config.intermediate_size,
                config.num_attention_heads,
                num_gqa_groups=config.num_key_value_heads,
                layernorm_epsilon=config.rms_norm_eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                attn_input_format="bshd",
                fuse_qkv_params=True,
                params_dtype=torch.bfloat16,
                device="cuda",
                layer_number=i + 1,
            )
            for i in range(config.num_hidden_layers)
        )
        self.norm = te.RMSNorm(width, eps=config.rms_norm_eps, params_dtype=torch.bfloat16)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False, **where)
        self.rope = RotaryPositionEmbedding(width // config.num_attention_heads)
        for module in (self.embed_tokens, self.lm_head):
            nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, ids: Tensor, precision: Callable[[], AbstractContextManager]) -> Tensor:
        x = self.embed_tokens(ids)
        angles = self.rope(ids.shape[1]).to(x.device)
        with precision():
            for layer in self.layers:
                x = layer(x, rotary_pos_emb=angles)
        return self.lm_head(self.norm(x))


def _transformer_engine(recipe_name: str):
    def build(workload: Workload, seed: int) -> Built:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        torch.manual_seed(seed)
        model = _TeModel(preset_config(workload.model))
        how = getattr(recipe, recipe_name)() if recipe_name else None

        def precision() -> AbstractContextManager:
            return te.autocast(enabled=True, recipe=how) if how is not None else nullcontext()

        def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
            logits = model(ids, precision).flatten(0, 1).float()
            targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
            return F.cross_entropy(logits, targets, ignore_index=-100)

        return _trained(workload, model, _adamw(model), loss_of, seed)

    return build


_AO, _LIGER = ("torchao", "0.18.0"), ("liger-kernel", "0.8.5")
_FLASH, _TE = ("flashoptim", "0.1.4"), ("transformer-engine", "2.20.2")


def _preset(preset: str, recompute: str = "none") -> Variant:
    name = preset if recompute == "none" else f"{preset}, {recompute} recomputed"
    return Variant(name, _ours(preset, recompute), preset=preset, recompute=recompute)


OURS = (
    *(_preset(name) for name in PRESETS if name not in ("amp-fp16", "storage")),
    _preset("fp8", "mlp"),
    _preset("fp8-lean", "layer"),
    Variant(
        "fp8-lean, delayed",
        _ours("fp8-lean", recipe="delayed"),
        preset="fp8-lean",
        recipe="delayed",
    ),
    *(
        Variant(f"{preset}, te:{how}", _ours(preset, recipe=f"te:{how}"), (_TE,))
        for preset, how in (("fp8", "current"), ("fp8", "delayed"), ("fp8-lean", "current"))
    ),
)
PEERS = (
    Variant("bf16, grouped experts", _grouped_bf16, moe=True),
    Variant("amp, compiled", _ours("amp", compiled=True)),
    Variant("bf16, compiled", _ours("bf16", compiled=True)),
    Variant("torchao tensorwise", _torchao("tensorwise"), (_AO,)),
    Variant("torchao rowwise", _torchao("rowwise"), (_AO,)),
    Variant("torchao + Liger", _torchao("tensorwise", liger=True), (_AO, _LIGER)),
    Variant(
        "torchao + Liger + FlashAdamW",
        _torchao("tensorwise", liger=True, flash=True),
        (_AO, _LIGER, _FLASH),
    ),
    Variant("TE bf16", _transformer_engine(""), (_TE,), dense=True),
    Variant("TE delayed", _transformer_engine("DelayedScaling"), (_TE,), dense=True),
    Variant("TE current", _transformer_engine("Float8CurrentScaling"), (_TE,), dense=True),
    Variant("TE block", _transformer_engine("Float8BlockScaling"), (_TE,), dense=True),
)
VARIANTS = {v.name: v for v in (*OURS, *PEERS)}
