"""Commands of the command line that need more than a few lines; cli.py lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from .terminal import err, out, print_json, request


def evaluate(
    source: Annotated[
        Path, typer.Argument(help="A run's folder, a checkpoint, or a Hugging Face folder.")
    ],
    text: Annotated[
        str, typer.Option(help="A text, folder or data set; what the run held out unless given.")
    ] = "",
    text_key: Annotated[
        str, typer.Option(help="With rows: the column that holds the text.")
    ] = "text",
    weights: Annotated[str, typer.Option(help="live, ema (the running average), or all.")] = "all",
    tokenizer: Annotated[str, typer.Option(help="The run's or the folder's unless given.")] = "",
    length: Annotated[int, typer.Option(help="Tokens in a window of --text.", min=2)] = 512,
    stride: Annotated[
        int, typer.Option(help="Tokens from one window to the next; 0: no overlap.", min=0)
    ] = 0,
    batch: Annotated[int, typer.Option(help="Windows in one forward.", min=1)] = 4,
    batches: Annotated[int, typer.Option(help="At most so many forwards; 0: all.", min=0)] = 0,
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16; fp32 on a CPU, bf16 on a GPU unless given.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-evaluation-harness, with commas, besides or instead.")
    ] = "",
    limit: Annotated[int, typer.Option(help="Examples of each task; 0: all.", min=0)] = 0,
    tasks_from: Annotated[str, typer.Option(help="A folder of more task files.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how good weights are: loss, perplexity and bits a byte on a text, and tasks.

    In plain PyTorch, nothing in 8 bits: what `ottava export` would write. Both the live weights and
    the running average, where the run kept one.
    """
    named = [t.strip() for t in tasks.split(",") if t.strip()]
    asked = Asked(
        text, text_key, tokenizer, length, stride, batch, batches, named, limit, tasks_from
    )
    with request():
        report = _evaluate(source, asked, weights, dtype, device)
    for reason in report.pop("passed_over"):
        err.print(f"passed over: {reason}")
    if as_json:
        print_json(report)
        return
    out.print(f"{report['source']}: {report['dtype']} on {report['device']}")
    for row in report["rows"]:
        out.print(_in_words(row))


class Asked(NamedTuple):
    """What to score, as the options of `eval` say it."""

    text: str
    text_key: str
    tokenizer: str
    length: int
    stride: int
    batch: int
    batches: int
    tasks: list[str]
    limit: int
    tasks_from: str


def _evaluate(source: Path, asked: Asked, weights: str, dtype: str, device: str) -> dict[str, Any]:
    import torch

    from .train import evaluate as ev

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: {device!r} is not one of auto, cpu, cuda")
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise ValueError("--device: no GPU here; use --device cpu")
    where = torch.device("cuda" if cuda and device != "cpu" else "cpu")
    kind, found = ev.dtype_for(dtype, where), ev.find_source(source)
    chosen = ev.chosen_weights(found, weights)
    words = harness = None
    if asked.text or asked.tasks:
        tokenizer = ev.tokenizer_of(found, asked.tokenizer)
    if asked.tasks:
        from .integrations.lm_eval import Harness

        harness = Harness(asked.tasks, tokenizer, limit=asked.limit, batch=asked.batch,
                          folder=asked.tasks_from)  # fmt: skip
    if asked.text:
        words = ev.text_of(
            asked.text, tokenizer, text_key=asked.text_key, length=asked.length,
            stride=asked.stride, batch=asked.batch, limit=asked.batches,
        )  # fmt: skip
    elif harness is None:
        words = ev.held_out(found, batch=asked.batch, limit=asked.batches)
    rows = []
    for name in chosen:
        model = ev.load_weights(found, name, kind, where)
        row: dict[str, Any] = {"weights": name, "tasks": harness(model) if harness else {}}
        rows.append(row if words is None else {**row, **ev.plain(ev.score(model, words, name))})
    return {
        "source": found.folder, "step": found.checkpoint.step if found.checkpoint else None,
        "dtype": str(kind).split(".")[-1], "device": where.type, "text": asked.text or None,
        "rows": rows, "passed_over": found.passed_over,
    }  # fmt: skip


def _in_words(row: dict) -> str:
    lines = [f"{row['weights']:<5}"]
    if "loss" in row:
        lines[0] += f" loss {row['loss']:.4f}  perplexity {row['perplexity']:.3f}"
        if row["bits_per_byte"] is not None:
            lines[0] += f"  bits a byte {row['bits_per_byte']:.4f}"
        lines[0] += f"  ({row['tokens']:,} tokens scored)"
    for task, values in row["tasks"].items():
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        lines.append(f"      {task}: {numbers}")
    return "\n".join(lines)
