"""Pages and blocks of the documentation that are made from the code: `python docs/generate.py`.

`--check` writes nothing and exits with 1 where a page differs. `--plan` also plans the table of gpu.md
again (minutes); without it that table is made from docs/gpu.json as it is.
"""

from __future__ import annotations

import html
import json
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from ottava.config import PRESETS, Run, run_of_model  # noqa: E402
from ottava.monitor.diagnose import RULES  # noqa: E402
from ottava.numerics.preset import Preset  # noqa: E402

NOTE = "<!-- made by `python docs/generate.py`; edit that, not this -->\n"
CARDS = (8, 12, 16, 24, 32, 48, 80, 141)  # GB, as cards are sold
RESERVED = 1.5  # GiB that the CUDA context, libraries and the allocator's rounding take
SHOWN = ("amp", "fp8-lean")
MODELS = (  # name, what it is, tokens in a sequence, keys
    ("dense-100m", "dense, 0.13 B", 2048, ()),
    ("mimo-v2-nano", "MiMo-V2 proxy, 32 experts, 0.14 B", 2048, ()),
    ("mimo-v2-tiny", "MiMo-V2 proxy, 48 experts, 0.48 B", 2048, ()),
    ("dense-w1", "dense, 1.5 B", 2048, ()),
    ("qwen2.5-7b", "Qwen2.5-7B", 2048, ()),
)


def pages() -> dict[str, str]:
    """file -> its whole text."""
    return {
        "troubleshooting.md": troubleshooting(),
        "settings.md": settings(),
        "stored.svg": stored(),
        "gpu.md": _filled("gpu.md", {"table": gpu_table(), "cards": gpu_cards()}),
        "recipes.md": _filled("recipes.md", {"presets": preset_table()}),
        "inside.md": _filled("inside.md", {"table": inside_table()}),
    }


def _filled(page: str, parts: dict[str, str]) -> str:
    text = (DOCS / page).read_text()
    for name, part in parts.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)"
        text, count = re.subn(pattern, lambda m, p=part: m[1] + p + m[2], text, flags=re.S)
        assert count == 1, f"{page}: no place for {name}"
    return text


# ---- troubleshooting ----


def troubleshooting() -> str:
    """One section for each rule of `ottava diagnose`, by what one sees."""
    kinds = {
        "error": "The run is lost, or will be",
        "warning": "Look at it",
        "note": "Good to know",
    }
    out = [
        "# Troubleshooting\n",
        NOTE,
        "`ottava diagnose FOLDER` looks for all of these in a run's own record, and shows for each that it "
        "finds the evidence and the setting with this run's numbers. Some need a run in higher precision "
        "to be held against: `ottava diagnose FOLDER --against OTHER`. In a setting, what stands in "
        "braces is filled in from the evidence.\n",
    ]
    for level, title in kinds.items():
        out.append(f"## {title}\n")
        for rule in (r for r in RULES.values() if r.level == level):
            out.append(f"### {rule.symptom[0].upper()}{rule.symptom[1:]}\n")
            out.append(f"Rule `{rule.name}`. Likely cause: {rule.cause}.\n")
            tried = rule.setting
            if re.fullmatch(r"\{\w+\}", tried):
                out.append("Try: what the finding says; it depends on what was seen.\n")
            else:
                out.append(f"Try: `{tried}`\n")
            if rule.unless:
                better = ", ".join(f"`{name}`" for name in rule.unless)
                out.append(f"Silent where {better} explains it better.\n")
    return "\n".join(out)


# ---- settings ----


def settings() -> str:
    """Every key of a run file."""
    out = [
        "# Every setting\n",
        NOTE,
        "A run is one TOML file. `section.key=value` on the command line changes a key. Text needs no quotes "
        "there, lists of texts are written with commas.\n",
        "## Top of the file\n",
        _keys(Run, ""),
    ]
    for f in fields(Run):
        section = _section(f)
        if section is None:
            continue
        about = (section.__doc__ or "").strip().partition(": ")[2]
        out += [
            f"## [{f.name}]\n",
            f"{about[0].upper()}{about[1:]}\n",
            _keys(section, f"{f.name}."),
        ]
    return "\n".join(out)


def _section(f) -> type | None:
    made = f.default_factory() if f.default_factory is not MISSING else None
    return type(made) if hasattr(made, "__dataclass_fields__") else None


def _keys(cls: type, prefix: str) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for f in fields(cls):
        if _section(f) is not None:
            continue
        default = f.default if f.default is not MISSING else f.default_factory()
        said = json.dumps(default if not isinstance(default, tuple) else list(default))
        meaning = _cell(f.metadata["doc"])
        if choices := f.metadata["choices"]:
            meaning += " One of " + ", ".join(f"`{c}`" for c in choices) + "."
        rows.append(f"| `{prefix}{f.name}` | `{said}` | {meaning} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


# ---- what is stored ----

_SIZE = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0, "split16": 2.0, "split24": 3.0, "none": 0.0}
_BAR = {"weights": "#4c6ef5", "gradients": "#f59f00", "moments": "#12b886"}


def stored_bytes(preset: Preset) -> dict[str, float]:
    """Bytes a parameter of each kind that a preset keeps between steps, scales left out."""
    split = preset.master.startswith("split")
    return {
        "weights": _SIZE[preset.master] if split else _SIZE[preset.param_dtype],
        "gradients": 0.0 if preset.fused else _SIZE[preset.grad_dtype],
        "moments": 2 * _SIZE[preset.states],
    }


def preset_table() -> str:
    """Presets and what they keep a parameter."""
    rows = ["| preset | weights | gradients | Adam's moments | together |", "|---|---|---|---|---|"]
    for preset in PRESETS.values():
        sizes = stored_bytes(preset)
        kind = preset.master if preset.master.startswith("split") else preset.param_dtype
        grads = "none kept" if preset.fused else preset.grad_dtype.upper()
        rows.append(
            f"| `{preset.name}` | {kind if 'split' in kind else kind.upper()}, {sizes['weights']:g} | {grads}, "
            f"{sizes['gradients']:g} | 2 x {preset.states.upper() if 'bit' not in preset.states else '8 bits'}, "
            f"{sizes['moments']:g} | **{sum(sizes.values()):g}** |"
        )
    return "\n".join(rows) + "\n"


def stored() -> str:
    """Bars of bytes a parameter, one for each preset."""
    scale, left, row = 34, 110, 34
    height = row * len(PRESETS) + 60
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" '
        'font-size="14"><title>Bytes a parameter that each preset keeps between steps</title>'
    ]
    for number, preset in enumerate(PRESETS.values()):
        y, x = 10 + number * row, left
        out.append(
            f'<text x="{left - 10}" y="{y + 17}" text-anchor="end" fill="#888">{preset.name}</text>'
        )
        for kind, size in stored_bytes(preset).items():
            if size:
                wide = size * scale
                out.append(f'<rect x="{x:g}" y="{y}" width="{wide:g}" height="24" fill="{_BAR[kind]}"/>'
                           f'<text x="{x + 6:g}" y="{y + 17}" fill="#fff">{size:g}</text>')  # fmt: skip
                x += wide
        total = sum(stored_bytes(preset).values())
        out.append(f'<text x="{x + 8:g}" y="{y + 17}" fill="#888">{total:g}</text>')
    x = left
    for kind, colour in _BAR.items():
        y = height - 24
        out.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>'
                   f'<text x="{x + 20}" y="{y + 12}" fill="#888">{kind}</text>')  # fmt: skip
        x += 120
    return "\n".join([*out, "</svg>"]) + "\n"


# ---- what fits ----


def planned(model: str, length: int, preset: str, keys: tuple[str, ...] = ()) -> float:
    """GiB at the peak of a step of one sequence, as the planner says."""
    from ottava import estimate_memory

    given = [
        f"train.preset={preset}",
        "train.micro_batch=1",
        f"data.sequence_length={length}",
        *keys,
    ]
    return round(estimate_memory(run_of_model(model, given), device="cuda").peak_gib, 2)


def plan_all() -> None:
    """Plan every cell of the table again into gpu.json."""
    found = {}
    for model, _, length, keys in MODELS:
        found[model] = {p: planned(model, length, p, keys if p != "amp" else ()) for p in SHOWN}
        print(model, found[model], flush=True)
    (DOCS / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")


def _cells() -> dict[str, dict[str, float]]:
    return json.loads((DOCS / "gpu.json").read_text())


def gpu_table() -> str:
    """GiB at the peak of each model under each preset."""
    rows = [
        "| model | " + " | ".join(f"`{p}`" for p in SHOWN) + " |",
        "|---|" + "---|" * len(SHOWN),
    ]
    for model, about, length, keys in MODELS:
        more = f", `{keys[0]}`" if keys else ""
        cells = " | ".join(f"{_cells()[model][p]:.1f}" for p in SHOWN)
        rows.append(f"| `{model}` ({about}), 1 x {length} tokens{more} | {cells} |")
    return "\n".join(rows) + "\n"


def gpu_cards() -> str:
    """For each size of card the largest of the models that trains, under each preset."""
    rows = [
        "| your GPU | " + " | ".join(f"`{p}`" for p in SHOWN) + " |",
        "|---|" + "---|" * len(SHOWN),
    ]
    for card in CARDS:
        room = card * 1e9 / 2**30 - RESERVED
        best = []
        for preset in SHOWN:
            fits = [m for m, *_ in MODELS if _cells()[m][preset] <= room]
            best.append(f"`{fits[-1]}`" if fits else "none of these")
        rows.append(f"| {card} GB | " + " | ".join(best) + " |")
    return "\n".join(rows) + "\n"


# ---- inside X ----

INSIDE = {  # case of benchmarks/inside.py -> how it is called here
    "plain": "your own loop",
    "trainer": "Hugging Face Trainer",
    "accelerate": "accelerate",
    "lightning": "Lightning",
    "peft": "PEFT, LoRA of rank 16",
    "deepspeed": "DeepSpeed, ZeRO-1",
}


def inside_table() -> str:
    """What benchmarks/inside.py measured."""
    measured = json.loads((DOCS / "inside.json").read_text())
    out = [
        "| X | FP8 modules | FP8 products a step | loss, X alone | loss, with Ottava | peak MiB alone | with Ottava | of it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, title in INSIDE.items():
        alone, ours = (
            next((r for r in measured["rows"] if r["case"] == case and r["ottava"] == way), None)
            for way in (False, True)
        )
        if alone is None or ours is None:
            out.append(f"| {title} | not measured | | | | | | |")
            continue
        out.append(
            f"| {title} | {ours['planned']} | {ours['products']:.0f} | {alone['first']:.3f} to {alone['last']:.3f} "
            f"| {ours['first']:.3f} to {ours['last']:.3f} | {alone['peak_mib']:.2f} | {ours['peak_mib']:.2f} | "
            f"{ours['peak_mib'] / alone['peak_mib']:.0%} |"
        )
    said = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    return "\n".join([*out, "", f"{measured['steps']} steps; {said}.", ""])


def main(arguments: list[str]) -> int:
    """Write what is made from the code; with --check only compare."""
    if "--plan" in arguments:
        plan_all()
    stale = [
        n
        for n, text in pages().items()
        if not (DOCS / n).exists() or (DOCS / n).read_text() != text
    ]
    if "--check" in arguments:
        for name in stale:
            print(f"docs/{name} is not what the code says; run: python docs/generate.py")
        return 1 if stale else 0
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    print(f"written: {', '.join(stale) or 'nothing, all is as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
