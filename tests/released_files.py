"""Small checkpoints written exactly as Xiaomi releases MiMo-V2, straight from the description of the
files and with none of the package's code: chunks, grids and quantization are loops over rows."""

import json

import torch
from safetensors.torch import save_file

from ottava.models.config import MiMoV2Config, MiMoV2FlashConfig

# Heads as wide as Pro's, so that a chunk of a full layer ends in half a block; partial blocks
# everywhere else.
SMALL = {
    "hidden_size": 320, "num_hidden_layers": 3, "vocab_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "swa_num_key_value_heads": 4, "hybrid_layer_pattern": [0, 1, 0],
    "intermediate_size": 200, "moe_intermediate_size": 192, "n_routed_experts": 3,
    "num_experts_per_tok": 2, "attention_value_scale": 0.612, "num_nextn_predict_layers": 1,
}  # fmt: skip
SECTION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    "ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(3)] + ["model.decoder.self_attn.o_proj"],
}  # fmt: skip


def small_config(**overrides):
    """The configuration of the small model; `flash=True` for the split family."""
    cls = MiMoV2FlashConfig if overrides.pop("flash", False) else MiMoV2Config
    return cls(**{**SMALL, **overrides})


def quantize(x, start=0):
    """(codes, scale) of x in blocks of 128 rows (counted from row -start) and 128 columns."""
    rows = sorted({0, *range(128 - start % 128, x.shape[0], 128), x.shape[0]})
    codes = torch.zeros(x.shape, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(len(rows) - 1, -(-x.shape[1] // 128))
    for i in range(len(rows) - 1):
        for j in range(scale.shape[1]):
            at = slice(rows[i], rows[i + 1]), slice(128 * j, 128 * j + 128)
            scale[i, j] = x[at].abs().max() / 448
            codes[at] = (x[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def value(codes, scale):
    """What codes under a grid of 128 x 128 blocks counted from row 0 stand for."""
    out = codes.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            out[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j]
    return out


class Files:
    """`tensors`: what the files hold. `truth`: the model's state in FP32."""

    def __init__(self, config, seed=0):
        self.config, self.generator = config, torch.Generator().manual_seed(seed)
        self.tensors, self.truth = {}, {}
        h, c = config.hidden_size, config
        self.bf16("model.embed_tokens.weight", c.vocab_size, h)
        for i in range(c.num_hidden_layers):
            name = f"model.layers.{i}."
            self.attention(name + "self_attn.", c.attention(i))
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.bf16(f"{name}{norm}.weight", h)
            if c.is_moe(i):
                self.moe(name + "mlp.")
            else:
                self.dense(name + "mlp.")
        self.bf16("model.norm.weight", h)
        for i in range(c.num_nextn_predict_layers):
            name = f"model.mtp.layers.{i}."
            for norm in [
                "enorm",
                "hnorm",
                "input_layernorm",
                "pre_mlp_layernorm",
                "final_layernorm",
            ]:
                self.bf16(f"{name}{norm}.weight", h)
            self.bf16(name + "eh_proj.weight", h, 2 * h)
            self.attention(name + "self_attn.", c.attention(None))
            self.dense(name + "mlp.")
        self.bf16("lm_head.weight", c.vocab_size, h)

    def random(self, *shape):
        """Rows of different sizes, so that a wrong scale shows."""
        x = torch.randn(shape, generator=self.generator) * 0.02
        return x * (1 + torch.arange(shape[0]) % 7).view(-1, *[1] * (len(shape) - 1))

    def bf16(self, name, *shape):
        self.tensors[name] = self.random(*shape).bfloat16()
        self.truth[name] = self.tensors[name].float()

    def fp8(self, name, rows, cols):
        codes, scale = quantize(self.random(rows, cols))
        self.tensors |= {name: codes, f"{name}_scale_inv": scale}
        return value(codes, scale)

    def dense(self, name):
        h, f = self.config.hidden_size, self.config.intermediate_size
        for key, shape in (("gate", (f, h)), ("up", (f, h)), ("down", (h, f))):
            weight = f"{name}{key}_proj.weight"
            self.truth[weight] = self.fp8(weight, *shape)

    def moe(self, name):
        h, f, experts = (
            self.config.hidden_size, self.config.moe_intermediate_size, self.config.n_routed_experts
        )  # fmt: skip
        gate_up, down = [], []
        for e in range(experts):
            pair = [self.fp8(f"{name}experts.{e}.{k}_proj.weight", f, h) for k in ("gate", "up")]
            gate_up.append(torch.cat(pair))
            down.append(self.fp8(f"{name}experts.{e}.down_proj.weight", h, f))
        self.truth[name + "experts.gate_up_proj"] = torch.stack(gate_up)
        self.truth[name + "experts.down_proj"] = torch.stack(down)
        for key, shape in (("weight", (experts, h)), ("e_score_correction_bias", (experts,))):
            self.tensors[f"{name}gate.{key}"] = self.random(*shape)
            self.truth[f"{name}gate.{key}"] = self.tensors[f"{name}gate.{key}"]

    def attention(self, name, spec):
        h, chunks = self.config.hidden_size, self.config.num_key_value_heads
        rows = [
            spec.num_heads * spec.qk_dim,
            spec.num_kv_heads * spec.qk_dim,
            spec.num_kv_heads * spec.v_dim,
        ]
        q, k, v = (r // chunks for r in rows)
        made = {n: [] for n in ("codes", "scale", "q", "k", "v")}
        for _ in range(chunks):
            codes, scale = quantize(self.random(q + k + v, h))
            made["codes"].append(codes)
            made["scale"].append(scale)
            for key, part in zip("qkv", value(codes, scale).split([q, k, v]), strict=True):
                made[key].append(part)
        if spec.fused:
            self.tensors[name + "qkv_proj.weight"] = torch.cat(made["codes"])
            self.tensors[name + "qkv_proj.weight_scale_inv"] = torch.cat(made["scale"])
            self.truth[name + "qkv_proj.weight"] = torch.cat(made["q"] + made["k"] + made["v"])
        else:
            last = [-(-r // 128) for r in (q, q + k, q + k + v)]
            first = [0, last[0], last[1]]
            for number, (key, size) in enumerate(zip("qkv", (q, k, v), strict=True)):
                begin, weight = (0, q, q + k)[number], f"{name}{key}_proj.weight"
                codes = [c[begin : begin + size] for c in made["codes"]]
                scale = [s[first[number] : last[number]] for s in made["scale"]]
                self.tensors |= {weight: torch.cat(codes), f"{weight}_scale_inv": torch.cat(scale)}
                self.truth[weight] = torch.cat(made[key])
        self.bf16(name + "o_proj.weight", h, spec.num_heads * spec.v_dim)
        if spec.sinks:
            self.bf16(name + "attention_sink_bias", spec.num_heads)

    def write(self, folder, shards=3):
        """The folder: `shards` files and the MTP file, the index and config.json."""
        folder.mkdir(exist_ok=True)
        main = [n for n in self.tensors if ".mtp." not in n]
        files = {f"model_{i}.safetensors": main[i::shards] for i in range(shards)}
        files["model_mtp.safetensors"] = [n for n in self.tensors if ".mtp." in n]
        for file, names in files.items():
            save_file({n: self.tensors[n] for n in names}, folder / file, {"format": "pt"})
        size = sum(t.nbytes for t in self.tensors.values())
        index = {
            "metadata": {"total_size": size},
            "weight_map": {n: f for f, names in files.items() for n in sorted(names)},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        keys = self.config.to_dict() | {"quantization_config": SECTION}
        (folder / "config.json").write_text(json.dumps(keys))
        return folder


def read_all(folder):
    """Every tensor of a folder, by the library's own reader."""
    from safetensors import safe_open

    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            out |= {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
    return out


def same(a, b):
    """Equal dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(x):
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
