"""The sections of a run file: every key with its meaning, its choices and its range, once.

What keys mean together is config.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .numerics.policy import POLICIES
from .numerics.preset import MASTERS, PRESETS, RECOMPUTES, STATES
from .numerics.recipe import ATTENTION_KEEPS, RECIPE_NAMES
from .schema import key

TRACKERS = ("tensorboard", "trackio", "wandb")  # monitor/trackers.py opens them


@dataclass(frozen=True, kw_only=True)
class Model:
    """[model]: what is trained. Exactly one of `name` and `path`."""

    name: str = key("", "A model preset, such as mimo-v2-nano or dense-w1; starts from nothing.")
    path: str = key("", "A local Hugging Face causal-LM folder.")
    overrides: dict[str, Any] = key(
        doc="Hugging Face config keys to change, such as num_hidden_layers.", factory=dict
    )
    random_init: bool = key(False, "With path: read the config only and start from nothing.")
    layout: str = key("auto", "With a path to FP8 files: how q, k, v are laid out; released (Xiaomi's "
                      "files), canonical ([Q | K | V]), auto where the files say it.",
                      choices=("auto", "canonical", "released"))  # fmt: skip
    freeze_router: bool = key(False, "Routers train neither weight nor correction bias.")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """[lora]: adapters on a frozen base, whose FP8 files stay in memory as they are. Needs PEFT."""

    rank: int = key(0, "Rank of the adapters; 0: the whole model trains.", low=0)
    alpha: float = key(32.0, "Adapters are added alpha / rank times.", above=0.0)
    dropout: float = key(0.0, "Dropout before adapters.", low=0.0, below=1.0)
    targets: tuple[str, ...] = key(("all-linear",), "Names of linears that get adapters; all-linear: "
                                   "every one but the head.")  # fmt: skip
    experts: bool = key(False, "Routed experts get adapters too.")


@dataclass(frozen=True, kw_only=True)
class Data:
    """[data]: the tokens."""

    source: str = key(
        "stdlib",
        "stdlib (the Python standard library's sources), random (random tokens, for speed), a "
        ".txt/.md/.jsonl/.parquet file or a folder of them, a Hugging Face dataset folder or name.",
    )
    kind: str = key(
        "text",
        "text; chat (a list of messages a row) or instruction (columns of a row), both through the "
        "tokenizer's chat template and with loss on the answers only.",
        choices=("text", "chat", "instruction"),
    )
    text_key: str = key("text", "text: the column or JSON key that holds it.")
    messages_key: str = key("messages", "chat: the column that holds the messages.")
    prompt_keys: tuple[str, ...] = key(("prompt",), "instruction: the columns that make up the "
                                       "question; empty ones are left out.")  # fmt: skip
    answer_key: str = key("completion", "instruction: the column that holds the answer.")
    mix: dict[str, Any] = key(
        doc="Several sources in place of one: source = weight, or source = {weight = 1, kind = "
        '"chat", ...} with keys of [data] that differ there.',
        factory=dict,
    )
    tokenizer: str = key("bytes", "bytes (256 values and a document separator), or a Hugging Face "
                         "tokenizer folder or name.")  # fmt: skip
    sequence_length: int = key(512, "Tokens in a sequence.", low=2)
    pack: bool = key(True, "Fill sequences with documents end to end; false: one document a "
                     "sequence, cut or padded.")  # fmt: skip
    document_mask: bool = key(True, "Attention does not look across document boundaries.")
    validation_fraction: float = key(0.05, "Share of the documents held out.", low=0.0, below=1.0)
    shuffle: bool = key(True, "Visit sequences in a seeded random order each epoch.")
    max_bytes: int = key(0, "Read at most this many bytes of text; 0: all.", low=0)
    cache: str = key(
        "auto",
        "Where tokens are kept between runs, and read from piece by piece: auto (the user's cache; "
        "bytes below 256 MiB stay in memory), off (in memory), or a folder.",
    )


@dataclass(frozen=True, kw_only=True)
class Train:
    """[train]: the loop."""

    preset: str = key("fp8", "A named set of precision choices.", choices=tuple(PRESETS))
    steps: int = key(1000, "Optimizer steps.", low=1)
    micro_batch: int = key(8, "Sequences in one forward.", low=1)
    accumulate: int = key(1, "Forwards in one optimizer step.", low=1)
    recompute: str = key("none", "What is computed again in backward instead of kept.",
                         choices=RECOMPUTES)  # fmt: skip
    eval_every: int = key(0, "Evaluate every so many steps; 0: only at the end.", low=0)
    eval_batches: int = key(8, "Micro-batches in one evaluation; 0: no evaluation.", low=0)
    checkpoint_every: int = key(0, "Save every so many steps; 0: only at the end.", low=0)
    keep_last: int = key(2, "Checkpoints kept.", low=1)
    save: str = key("blocking", "How checkpoints are written: blocking (the run waits), background "
                    "(copied to the host, then written while the run goes on).",
                    choices=("blocking", "background"))  # fmt: skip
    data_timeout_s: float = key(600.0, "A batch that has not come for so long ends the run.",
                                above=0.0)  # fmt: skip
    graph: str = key("auto", "Replay the step as a CUDA graph: auto (on a GPU, where it can be), "
                     "on, off.", choices=("auto", "on", "off"))  # fmt: skip
    resume: str = key("auto", "auto (continue from the newest checkpoint in out), never, or the "
                      "path of a checkpoint.")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """[optimizer]: AdamW and its schedule. "preset" takes the preset's choice."""

    lr: float = key(3e-4, "Peak learning rate.", low=0.0)
    betas: tuple[float, float] = key((0.9, 0.95), "Decay of the two moments.", low=0.0, below=1.0)
    eps: float = key(1e-8, "Added to the root of the second moment.", above=0.0)
    weight_decay: float = key(0.1, "Decoupled weight decay, on matrices only.", low=0.0)
    clip_norm: float = key(0.0, "Largest global gradient norm; 0: no clipping.", low=0.0)
    master: str = key("preset", "What the weights are kept in.",
                      choices=("preset", *MASTERS))  # fmt: skip
    states: str = key("preset", "What the moments are kept in.",
                      choices=("preset", *STATES))  # fmt: skip
    moments_on: str = key("device", "Where the moments live; host: in the CPU's memory, copied to "
                          "the GPU and back beside the backward pass.",
                          choices=("device", "host"))  # fmt: skip
    grads: str = key("preset", "What gradients are kept in.", choices=("preset", "fp32", "bf16"))
    fused: str = key("preset", "Step inside backward and keep no gradients.",
                     choices=("preset", "on", "off"))  # fmt: skip
    schedule: str = key("cosine", "Learning rate after warm-up.",
                        choices=("cosine", "linear", "constant"))  # fmt: skip
    warmup_steps: int = key(0, "Steps of linear warm-up.", low=0)
    min_lr_ratio: float = key(0.1, "Last learning rate over the peak.", low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """[precision]: which modules run in FP8, how, and when."""

    recipe: str = key(
        "preset",
        "How FP8 linears scale; te:* run on Transformer Engine.",
        choices=("preset", *RECIPE_NAMES),
    )
    te: dict[str, Any] = key(
        doc="With a te:* recipe: options of Transformer Engine's own, such as amax_history_len.",
        factory=dict,
    )
    attention: str = key("int8", "What attention keeps q, k and v as, where a recipe keeps codes.",
                         choices=ATTENTION_KEEPS)  # fmt: skip
    policy: str = key("default", "Which modules stay in high precision.",
                      choices=tuple(POLICIES))  # fmt: skip
    keep: tuple[str, ...] = key((), "Globs of module names that stay in high precision.")
    start_fp8_at: float = key(
        0.0, "Share of the steps run in BF16 before FP8 starts.", low=0.0, below=1.0
    )
    finish_bf16_at: float = key(
        1.0, "Share of the steps after which the rest runs in BF16; 1: never.", above=0.0, high=1.0
    )
    lr_scale: float = key(1.0, "Multiplies optimizer.lr where the preset has FP8.", above=0.0)
    first_last_high: bool = key(False, "Keep the first and the last layer in high precision.")


@dataclass(frozen=True, kw_only=True)
class Scaler:
    """[scaler]: dynamic loss scaling, used by amp-fp16 only."""

    init_scale: float = key(2.0**16, "First scale.", low=0.0)
    growth_factor: float = key(2.0, "Multiplies the scale after growth_interval.", above=1.0)
    backoff_factor: float = key(0.5, "Multiplies the scale on overflow.", above=0.0, below=1.0)
    growth_interval: int = key(1000, "Clean steps before the scale grows.", low=1)
    max_scale: float = key(0.0, "Cap of the scale; 0: none.", low=0.0)
    min_scale: float = key(1.0, "Floor of the scale.", above=0.0)


@dataclass(frozen=True, kw_only=True)
class Ema:
    """[ema]: an FP32 running average of the weights, used for evaluation."""

    decay: float = key(0.0, "Decay a step; 0: off.", low=0.0, below=1.0)


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """[distributed]: several processes, started by torchrun or by DeepSpeed's launcher."""

    strategy: str = key("single", "ddp (the whole model on every rank), fsdp2 (every rank keeps a "
                        "share), deepspeed (ZeRO), or single: one process.",
                        choices=("single", "ddp", "fsdp2", "deepspeed"))  # fmt: skip
    timeout_s: float = key(
        600.0, "A rank that has not answered for so long is given up.", above=0.0
    )
    bucket_mib: float = key(25.0, "ddp: gradients reduced at a time.", above=0.0)
    replicas: int = key(1, "fsdp2: groups of ranks of which each shares out a whole model; over 1: "
                        "gradients are also summed over the groups (HSDP).", low=1)  # fmt: skip
    gather: str = key("fp8", "fsdp2: how the weights of FP8 layers travel: fp8 (as codes), or full.",
                      choices=("fp8", "full"))  # fmt: skip
    deepspeed: str = key("", "deepspeed: its JSON configuration.")


@dataclass(frozen=True, kw_only=True)
class Log:
    """[log]: what is written while training."""

    every: int = key(1, "Write a line of run.jsonl every so many steps.", low=1)
    trackers: tuple[str, ...] = key((), "Where steps and evaluations go besides run.jsonl.",
                                    choices=TRACKERS)  # fmt: skip
    project: str = key("ottava", "The project of trackio and wandb.")


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """[monitor]: what is looked at inside a step, into run.jsonl (see monitor/metrics.py)."""

    every: int = key(
        100,
        "Look at every row's operands, weights, gradients and moments in one step of so many; "
        "0: never.",
        low=0,
    )
    locate: bool = key(True, "Run a step with non-finite numbers again, to name the first of them.")


@dataclass(frozen=True, kw_only=True)
class Heal:
    """[heal]: what a run does about bad steps: non-finite or exploding ones, which change nothing."""

    after: int = key(10, "Bad steps in a row before the run goes back; with amp-fp16 at least 50.",
                     low=1)  # fmt: skip
    rollbacks: int = key(4, "Times that a run goes back before it stops; 0: it stops at once.",
                         low=0)  # fmt: skip
    norm_factor: float = key(100.0, "A gradient norm of so many times the recent median is an "
                             "explosion; 0: never.", low=0.0)  # fmt: skip
    loss_rise: float = key(5.0, "A loss so many nats above the recent median is an explosion; "
                           "0: never.", low=0.0)  # fmt: skip
    demote: bool = key(True, "Going back, put the 8-bit row at fault into high precision.")
    promote_after: int = key(0, "Steps after which a demoted row is 8-bit again; 0: never.", low=0)
    lr_factor: float = key(0.5, "Going back again with no row at fault, multiply the learning rate.",
                           above=0.0, high=1.0)  # fmt: skip
