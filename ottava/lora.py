"""LoRA by PEFT in a run: adapters put into a model in place, and written as PEFT's own files.

Names, files and options are PEFT's; what it does to frozen codes and to experts is layers/frozen.py
and layers/adapters.py. Needs `pip install peft`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .schema import ConfigError
from .sections import Lora

_ADAPTER = "default"
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("lora.rank: adapters need PEFT; `pip install peft`, or rank=0") from None
    return peft


def peft_config(lora: Lora, base: str = "") -> Any:
    """The `peft.LoraConfig` of a run's section; `base`: the folder of the base model."""
    targets: Any = list(lora.targets)
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        target_parameters=list(_EXPERTS) if lora.experts else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
    )


def add_lora(model: nn.Module, lora: Lora) -> nn.Module:
    """Freeze `model` and put adapters into it, in place; returns it.

    B starts at zero, so that it computes what it did. Raises ConfigError without PEFT and where no
    layer has a name of `targets`.
    """
    try:
        _peft().inject_adapter_in_model(peft_config(lora), model, _ADAPTER)
    except ValueError as error:
        raise ConfigError(f"lora.targets: {' '.join(str(error).split())}") from None
    for module in model.modules():
        if _ADAPTER in getattr(module, "lora_A", ()):
            # PEFT made them in the base's dtype, which rounds what they start from
            module.lora_A.float(), module.lora_B.float()
            module.reset_lora_parameters(_ADAPTER, True)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    model.__dict__["_ottava_adapters"] = True
    return model


def save_adapter(
    adapters: Mapping[str, torch.Tensor], lora: Lora, base: str, folder: str | Path
) -> None:
    """Write the folder that `PeftModel.from_pretrained` reads from the parameters that trained, by
    their names in the model."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {n: "base_model.model." + n.replace(f".{_ADAPTER}.", ".") for n in adapters}
    tensors = {names[n]: t.detach().float().cpu().contiguous() for n, t in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = peft_config(lora, base)
    config.inference_mode = True
    config.save_pretrained(folder)


def merged(model: nn.Module, adapters: Mapping[str, torch.Tensor], lora: Lora) -> nn.Module:
    """The plain model `model`, in high precision, with `adapters` added to its weights."""
    whole = _peft().get_peft_model(model, peft_config(lora), _ADAPTER)
    own = dict(whole.base_model.model.named_parameters())
    with torch.no_grad():
        for name, value in adapters.items():
            own[name].copy_(value)
    return whole.merge_and_unload()
