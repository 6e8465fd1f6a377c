"""MiMo-V2 written a second time, as loops over tokens, heads and experts, in FP64.

Follows the published forward pass literally and shares no code with the package. Parameters come
from a state dict; autograd through the loops gives the reference gradients.
"""

import math

import torch


def rms(x, w, eps):
    return w * x * (x.square().mean() + eps) ** -0.5


def rope(x, position, rotary, theta):
    half = rotary // 2
    out = list(x.unbind())
    for i in range(half):
        angle = position * theta ** (-2 * i / rotary)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return torch.stack(out)


def attention(p, x, c, swa, documents):
    kv = c["swa_num_key_value_heads"] if swa else c["num_key_value_heads"]
    heads, d, v_dim = c["num_attention_heads"], c["head_dim"], c["v_head_dim"]
    theta = c["swa_rope_theta"] if swa else c["rope_theta"]
    window = c["sliding_window"] if swa else len(x)
    rotary = int(c["partial_rotary_factor"] * d)
    w = p["qkv_proj.weight"]
    w_q, w_k, w_v = w.split([heads * d, kv * d, kv * v_dim])
    q = [[rope(h, t, rotary, theta) for h in (w_q @ x[t]).split(d)] for t in range(len(x))]
    k = [[rope(h, t, rotary, theta) for h in (w_k @ x[t]).split(d)] for t in range(len(x))]
    v = [[h * c["attention_value_scale"] for h in (w_v @ x[t]).split(v_dim)] for t in range(len(x))]
    rows = []
    for i in range(len(x)):
        mixed = []
        for a in range(heads):
            g = a // (heads // kv)
            seen = [j for j in range(i + 1) if i - window < j and documents[i] == documents[j]]
            logits = torch.stack([q[i][a] @ k[j][g] / math.sqrt(d) for j in seen])
            total = logits.exp().sum()
            if swa:
                total = total + p["attention_sink_bias"][a].exp()
            mixed.append(sum(e / total * v[j][g] for e, j in zip(logits.exp(), seen, strict=True)))
        rows.append(p["o_proj.weight"] @ torch.cat(mixed))
    return torch.stack(rows)


def silu_mlp(x, gate, up, down):
    g = gate @ x
    return down @ (g * torch.sigmoid(g) * (up @ x))


def dense(p, x):
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    return torch.stack([silu_mlp(row, *(p[n] for n in names)) for row in x])


def moe(p, x, c):
    width = c["moe_intermediate_size"]
    out = []
    for row in x:
        s = torch.sigmoid(p["gate.weight"] @ row)
        ranking = (s + p["gate.e_score_correction_bias"]).tolist()
        chosen = sorted(range(len(ranking)), key=lambda e: -ranking[e])[: c["num_experts_per_tok"]]
        total = sum(s[e] for e in chosen) + 1e-20
        y = 0
        for e in chosen:
            gate, up = p["experts.gate_up_proj"][e].split(width)
            y = y + s[e] / total * c["routed_scaling_factor"] * silu_mlp(
                row, gate, up, p["experts.down_proj"][e]
            )
        out.append(y)
    return torch.stack(out)


def under(p, prefix):
    return {n[len(prefix) :]: v for n, v in p.items() if n.startswith(prefix)}


def decoder(p, ids, c, documents):
    eps = c["layernorm_epsilon"]
    x = torch.stack([p["model.embed_tokens.weight"][t] for t in ids])
    for i, swa in enumerate(c["hybrid_layer_pattern"]):
        layer = under(p, f"model.layers.{i}.")
        normed = torch.stack([rms(r, layer["input_layernorm.weight"], eps) for r in x])
        x = x + attention(under(layer, "self_attn."), normed, c, swa, documents)
        normed = torch.stack([rms(r, layer["post_attention_layernorm.weight"], eps) for r in x])
        mlp = under(layer, "mlp.")
        x = x + (moe(mlp, normed, c) if c["moe_layer_freq"][i] else dense(mlp, normed))
    return torch.stack([rms(r, p["model.norm.weight"], eps) for r in x])


def cross_entropy(logits, targets):
    kept = [(row, t) for row, t in zip(logits, targets, strict=True) if t is not None]
    return sum(torch.logsumexp(row, 0) - row[t] for row, t in kept) / len(kept)


def mtp(p, state, ids, c, k, documents):
    """Hidden rows of block k for the positions whose token t + 1 + k exists."""
    block, eps = under(p, f"model.mtp.layers.{k}."), c["layernorm_epsilon"]
    rows = []
    for t in range(len(ids) - 1 - k):
        token = rms(p["model.embed_tokens.weight"][ids[t + 1 + k]], block["enorm.weight"], eps)
        rows.append(
            block["eh_proj.weight"] @ torch.cat([token, rms(state[t], block["hnorm.weight"], eps)])
        )
    x = torch.stack(rows)
    normed = torch.stack([rms(r, block["input_layernorm.weight"], eps) for r in x])
    x = x + attention(under(block, "self_attn."), normed, c, True, documents)
    normed = torch.stack([rms(r, block["pre_mlp_layernorm.weight"], eps) for r in x])
    x = x + dense(under(block, "mlp."), normed)
    return torch.stack([rms(r, block["final_layernorm.weight"], eps) for r in x])


def loss(p, ids, c, documents):
    """(logits [T, V], main + weighted MTP loss) of one sequence."""
    state = decoder(p, ids, c, documents)
    head = p["lm_head.weight"]
    logits = state @ head.T
    value = cross_entropy(logits[:-1], ids[1:])
    blocks = c["num_nextn_predict_layers"]
    for k in range(blocks):
        rows = mtp(p, state, ids, c, k, documents)[: len(ids) - 2 - k] @ head.T
        targets = [
            ids[t + 2 + k] if documents[t] == documents[t + 2 + k] else None
            for t in range(len(rows))
        ]
        value = value + c["mtp_loss_weight"] / blocks * cross_entropy(rows, targets)
    return logits, value
