"""From a name or a local folder to a model: built on meta, initialised parameter by parameter.

Random weights depend on (seed, parameter name) only: the same FP32 numbers whatever dtype is asked
for, whatever other parameters exist. Peak memory is the model plus one FP32 parameter.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from .config import MiMoConfig, MiMoV2Config, MiMoV2FlashConfig
from .mimo import MODELS, Router, own_parameters
from .presets import ALIASES, PRESETS, merge_overrides, preset_config
from .shards import read_json

CONFIGS = {c.model_type: c for c in (MiMoV2Config, MiMoV2FlashConfig, MiMoConfig)}


def load_config(name_or_path: str, overrides: dict[str, Any] | None = None) -> PretrainedConfig:
    """The configuration of a preset or of a local folder, with config keys overridden.

    Raises ValueError for an unknown name or key (with the nearest one) and for a folder without
    config.json.
    """
    overrides = dict(overrides or {})
    folder = Path(name_or_path)
    if not _is_folder(name_or_path):
        return preset_config(name_or_path, overrides)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model: {folder} holds no config.json")
    keys = read_json(path)
    if keys.get("model_type") in CONFIGS:
        return CONFIGS[keys["model_type"]](**merge_overrides(keys, overrides))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for key, value in overrides.items():
        if not hasattr(config, key):
            near = difflib.get_close_matches(key, list(config.to_dict()), 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{config.model_type} config: unknown key {key!r}{hint}")
        setattr(config, key, value)
    return config


def _is_folder(name_or_path: str) -> bool:
    """Whether a name is a folder here; a preset's name is that preset."""
    return name_or_path not in {*PRESETS, *ALIASES} and Path(name_or_path).is_dir()


def load_model(
    name_or_path: str,
    *,
    overrides: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    random_init: bool = False,
) -> nn.Module:
    """A causal language model in training mode.

    `name_or_path`: a preset (always random weights) or a local Hugging Face folder (its weights, or
    random ones with `random_init`); no code of the folder is run. `device="meta"` allocates
    nothing. Router weights stay FP32. Raises ValueError as `load_config` does, for a MiMo folder
    whose weights are quantized, and for tensors that are missing or too many.
    """
    config = load_config(name_or_path, overrides)
    ours = config.model_type in CONFIGS
    quantized = getattr(config, "quantization_config", None)
    if _is_folder(name_or_path) and not random_init and torch.device(device).type != "meta":
        if ours and quantized:
            raise ValueError(
                f"model: {name_or_path} holds quantized weights ({quantized.get('quant_method')}); "
                "load them with ottava.load_fp8, or ask for random_init"
            )
        cls = MODELS[config.model_type] if ours else AutoModelForCausalLM
        return _read(cls, name_or_path, config, dtype).to(device).train()
    if quantized:
        del config.quantization_config  # random weights are not
    config.dtype = dtype
    with torch.device("meta"):
        model = MODELS[config.model_type](config) if ours else _foreign(config)
    model = model.to(dtype)
    if torch.device(device).type != "meta":
        if ours:
            initialise(model, seed=seed, device=device)
        else:
            torch.manual_seed(seed)
            model = _foreign(config).to(dtype).to(device)
    return model.train()


def holds_fp8(name_or_path: str) -> bool:
    """Whether this is a folder whose config.json says that its weights are FP8."""
    path = Path(name_or_path) / "config.json"
    if not _is_folder(name_or_path) or not path.is_file():
        return False
    section = read_json(path).get("quantization_config") or {}
    return section.get("quant_method") in ("fp8", "compressed-tensors")


def skeleton(
    folder: str, *, overrides: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model of a folder in training mode, every parameter on meta, for `load_fp8` to fill.

    Buffers that no file holds (another family's rotary tables) have their values. Raises ValueError
    as `load_config` does.
    """
    config = load_config(folder, overrides)
    if config.model_type in CONFIGS:
        return load_model(folder, overrides=overrides, dtype=dtype, device="meta")
    del config.quantization_config
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)
    model.tie_weights()
    return model.train()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are built inside have their parameters on meta, their buffers in memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and not value.is_meta:
            value = nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)
        register(module, name, value)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _read(cls, folder: str, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model of a folder's weights, all of them and no others."""
    model, info = cls.from_pretrained(
        folder, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False
    )
    for what in ("missing_keys", "unexpected_keys"):
        # MTP tensors of a released checkpoint are left where the model has no MTP blocks.
        names = sorted(n for n in info[what] if what == "missing_keys" or ".mtp" not in n)
        if names:
            state = model.state_dict() if what == "unexpected_keys" else info["unexpected_keys"]
            near = difflib.get_close_matches(names[0], list(state), 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(
                f"model: {folder}: {len(names)} {what.replace('_keys', '')} tensors, first "
                f"{names[0]!r}{hint}"
            )
    return model


def _foreign(config: PretrainedConfig) -> nn.Module:
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)


def initial_value(
    name: str, shape: torch.Size, std: float, *, seed: int, device: str | torch.device
) -> Tensor:
    """FP32 N(0, std^2) values of the parameter called `name`; the same for the same arguments."""
    generator = torch.Generator(device=device)
    # 32 bits: all that a CPU generator takes of a seed.
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator.manual_seed(int.from_bytes(digest, "little"))
    value = torch.empty(shape, dtype=torch.float32, device=device)
    return value.normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int, device: str | torch.device) -> nn.Module:
    """Give every parameter and buffer of a MiMo model on meta its starting value, in its dtype.

    Weights N(0, initializer_range^2), norms one, biases zero. Tied weights stay tied.
    """
    std = model.config.initializer_range
    done: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        random = {id(p) for p in own_parameters(module)}
        for name, old in list(module.named_parameters(prefix, recurse=False)):
            if id(old) not in done:
                matrix = isinstance(module, nn.Linear | nn.Embedding) and old.dim() == 2
                if matrix or id(old) in random:
                    value = initial_value(name, old.shape, std, seed=seed, device=device)
                else:
                    fill = 0.0 if name.endswith(".bias") else 1.0
                    value = torch.full(old.shape, fill, device=device)
                new = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
                done[id(old)] = new
            setattr(module, name.rpartition(".")[2], done[id(old)])
        if isinstance(module, Router):
            module.e_score_correction_bias = torch.zeros(module.num_experts, device=device)
    return model
