"""The command line: `ottava doctor | plan | compare | sweep | train | report | diagnose | eval | export`.

Exit codes: 0 done, 1 the run failed, 2 the request was wrong; 130 after Ctrl-C, 143 after SIGTERM,
138 after SIGUSR1 (a scheduler's warning): saved, and the same command continues.
An error is one line on stderr (`ottava --debug ...` adds the traceback). With --json the result is
one JSON object on stdout, and everything else goes to stderr.

Heavy modules are imported by the command that needs them, so that --help and a wrong request
answer at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .commands import evaluate
from .plan_command import plan
from .terminal import DONE, FAILED, REFUSED, Refused, err, out, print_json, request, say

app = typer.Typer(
    name="ottava",
    help="Train large language models in 8 bits: plan what fits, compare precisions, train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_RUN_FILE = typer.Argument(help="A run file (TOML), such as runs/demo.toml.")
RunFile = Annotated[Path, _RUN_FILE]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value ...: change keys of the run file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code. Never raises."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
    try:
        code = app([a for a in arguments if a != "--debug"], "ottava", standalone_mode=False)
    except Refused as refused:
        return say(refused.__cause__, REFUSED, debug)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left
        sys.stderr.close()
        return DONE
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: unknown command, option, argument
            return say(error, REFUSED, debug)
        if type(error).__name__ == "Abort":
            return 130
        return say(error, FAILED, debug)
    return code if isinstance(code, int) else DONE


def _version(wanted: bool) -> None:
    if wanted:
        from .bench.machine import version_of

        print(f"ottava {version_of('ottava') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="With an error, also print its traceback.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    local_rank: Annotated[  # DeepSpeed's launcher gives it; the environment says it too
        int, typer.Option("--local_rank", hidden=True)
    ] = 0,
) -> None:
    """Train large language models in 8 bits: plan what fits, compare precisions, train."""


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can do, which presets it gets and why, and what is missing."""
    from .doctor import examine, page

    facts = examine()
    if as_json:
        print_json(facts)
        return
    out.print(page(facts))


app.command()(plan)


@app.command()
def compare(
    run_file: Annotated[Path | None, _RUN_FILE] = None,
    overrides: Overrides = None,
    presets: Annotated[
        str, typer.Option(help="Presets to compare, with commas; all that apply unless given.")
    ] = "",
    repeats: Annotated[int, typer.Option(help="Timed slices of each preset.", min=1)] = 3,
    workload: Annotated[
        str, typer.Option(help="In place of a run file: W1, W2, W3, W4, tiny or base (GPU).")
    ] = "",
    peers: Annotated[
        bool, typer.Option("--peers", help="With --workload: other systems too.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Train the same run under several presets: peak memory by category, tokens/s, loss gap.

    Writes compare.json and report.html into the run's folder. A preset that fails does not stop
    the others; the exit code is then 1. A workload goes on where it was when it was stopped.
    """
    names = [n.strip() for n in presets.split(",") if n.strip()]
    with request():
        if workload:
            result, folder = _contest(workload, peers, names, repeats)
        else:
            result, folder = _compare(run_file, overrides, names, repeats, as_json)
    if as_json:
        print_json(result)
    else:
        from .bench.table import comparison_table

        out.print(comparison_table(result))
        out.print(f"{folder}/compare.json\n{folder}/report.html")
    return FAILED if any(row["status"] == "failed" for row in result["rows"]) else DONE


def _compare(run_file: Path | None, overrides, names: list[str], repeats: int, quiet: bool):
    from .config import load_run

    if run_file is None:
        raise ValueError("compare: give a run file (runs/demo.toml), or --workload")
    run = load_run(run_file, overrides or ())
    for name in names:
        run.with_preset(name).check()
    from .bench.compare import compare as measure
    from .prepare import build_model
    from .train.data import load_data

    load_data(run, vocab_size=build_model(run, "meta").config.vocab_size)
    return measure(run, names or None, repeats=repeats, quiet=quiet), run.out


def _contest(workload: str, peers: bool, names: list[str], repeats: int):
    from .bench.contest import choose, contest, the_workload

    folder, variants = Path("out") / workload, choose(peers, names)
    return contest(the_workload(workload), variants, repeats=repeats, out=folder), folder


@app.command()
def sweep(
    run_file: RunFile,
    overrides: Overrides = None,
    lr: Annotated[str, typer.Option(help="Learning rates to try, with commas.")] = "",
    presets: Annotated[
        str, typer.Option(help="Presets to try them in, with commas; the run's own unless given.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Try learning rates in short runs over the same data: table, plot, and the best one.

    Each run has train.steps steps. Writes sweep.json and sweep.html into the run's folder; the exit
    code is 1 where no rate converged.
    """
    from .config import load_run

    with request():
        run = load_run(run_file, overrides or ())
        try:
            rates = [float(x) for x in lr.split(",") if x.strip()]
        except ValueError:
            raise ValueError(f"--lr: {lr!r} is not a list of numbers; such as 1e-4,3e-4") from None
        from .bench.sweep import sweep as measure
        from .bench.sweep import sweep_cells
        from .bench.table import plain_table

        names = [n.strip() for n in presets.split(",") if n.strip()]
        result = measure(run, rates, names, quiet=as_json)
    if as_json:
        print_json(result)
    else:
        out.print(plain_table(*sweep_cells(result)))
        out.print(f"{result['verdict']}\n{run.out}/sweep.json\n{run.out}/sweep.html")
    return DONE if any(result["best"].values()) else FAILED


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    deepspeed: Annotated[Path | None, typer.Option(help="ZeRO, as this JSON file says.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Time a few steps by row.")] = False,
    as_json: Json = False,
) -> int:
    """Train. Continues from the newest checkpoint of the run's folder, if there is one.

    Ctrl-C saves and ends; twice ends at once. Several GPUs: torchrun --nproc-per-node=N -m ottava
    train run.toml distributed.strategy=fsdp2 (or ddp); or with --deepspeed, also under
    `deepspeed --num_gpus=N --module ottava train run.toml --deepspeed ds_config.json`.
    """
    from .config import load_run

    engine = ["distributed.strategy=deepspeed", f"distributed.deepspeed={deepspeed}"]
    with request():
        run = load_run(run_file, [*(overrides or ()), *(engine if deepspeed else ())])
        from .train.trainer import Trainer

        trainer = Trainer(run)
    result = trainer.run(quiet=as_json, profile=profile)
    if as_json and trainer.strategy.is_main:
        print_json({**asdict(result), "out": run.out, "exit_code": result.exit_code})
    return result.exit_code


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison.")],
    beside: Annotated[
        list[Path] | None, typer.Argument(help="More runs, to draw their losses beside it.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write; report.html there unless given."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained report.html: tables and plots of a run or a comparison."""
    from .bench.report import write_report

    with request():
        path = write_report(folder, to, beside=beside or ())
    if as_json:
        print_json({"report": path})
    else:
        out.print(str(path))


@app.command()
def diagnose(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    against: Annotated[
        Path | None,
        typer.Option(help="A run on the same data in higher precision, to judge the loss by."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what is wrong with a run, why, and which setting to change, from its run.jsonl.

    One rule for each fault it knows, with the evidence that it saw; --json lists the rules.
    """
    from .monitor.diagnose import RULES
    from .monitor.diagnose import diagnose as look

    with request():
        findings = look(folder, against)
    if as_json:
        rules = {r.name: {"source": r.source, "symptom": r.symptom} for r in RULES.values()}
        print_json({"findings": [asdict(f) for f in findings], "rules": rules})
        return
    for f in findings:
        out.print(f"{f.level.upper()}  {f.symptom} ({f.rule})")
        out.print(f"    seen:  {f.evidence}\n    cause: {f.cause}\n    try:   {f.setting}")
    out.print(f"{len(findings) or 'nothing'} found by {len(RULES)} rules.")


app.command("eval")(evaluate)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A run's folder, a checkpoint, or FP8 files.")],
    to: Annotated[Path, typer.Argument(help="The folder to write; new or empty.")],
    format: Annotated[
        str, typer.Option(help="bf16, fp8 (128 x 128 blocks), released (Xiaomi's), or adapter.")
    ] = "bf16",
    dtype: Annotated[str, typer.Option(help="With --format bf16: bf16, fp16 or fp32.")] = "bf16",
    layout: Annotated[
        str, typer.Option(help="How FP8 files given as source are laid out: released, canonical.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a plain Hugging Face folder: safetensors and config.json.

    From a folder of FP8 files too: to BF16, or from one layout to the other.
    """
    from .train.export import export as write

    with request():
        done = write(source, to, format=format, dtype=dtype, layout=layout or None)
    for reason in done.passed_over:
        err.print(f"passed over: {reason}")
    if as_json:
        print_json({k: v for k, v in asdict(done).items() if k != "passed_over"})
    else:
        step = "" if done.step is None else f"step {done.step} in "
        out.print(f"{done.folder}: {step}{done.dtype}")
