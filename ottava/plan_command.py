"""`ottava plan`: what computes and is kept in what, how many bytes, what fits, on one GPU or many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import Refused, out, print_json, request

if TYPE_CHECKING:
    from .config import Run
    from .numerics.policy import Plan


def plan(
    run_file: Annotated[
        Path | None, typer.Argument(help="A run file (TOML), such as runs/demo.toml.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value ...: change keys of the run file.")
    ] = None,
    model: Annotated[str, typer.Option(help="In place of a run file: a model's name.")] = "",
    preset: Annotated[str, typer.Option(help="Plan for this preset instead of the file's.")] = "",
    gib: Annotated[
        float, typer.Option(help="GiB of the GPU to fit into; this machine's unless given.", min=0)
    ] = 0.0,
    card: Annotated[str, typer.Option(help="h200, h100, a100, 4090, 5090, or a size in GiB.")] = "",
    gpus: Annotated[
        int, typer.Option(help="With --strategy: GPUs; the fewest that do unless given.", min=0)
    ] = 0,
    strategy: Annotated[
        str, typer.Option(help="fsdp2, hsdp, ddp, zero1, zero2, zero3 or expert-parallel.")
    ] = "single",
    nodes: Annotated[
        int, typer.Option(help="Machines; one for each 8 GPUs unless given.", min=0)
    ] = 0,
    link: Annotated[
        str, typer.Option(help="GB/s of a GPU each way: within a node,between nodes.")
    ] = "",
    experts_over: Annotated[
        int, typer.Option(help="expert-parallel: GPUs that share a layer's experts.", min=0)
    ] = 0,
    dispatch: Annotated[
        str, typer.Option(help="expert-parallel: fp8 or bf16 tokens on their way to experts.")
    ] = "fp8",
    lora: Annotated[
        int, typer.Option(help="Adapters of this rank on a frozen model in FP8.", min=0)
    ] = 0,
    longest: Annotated[
        bool, typer.Option("--longest", help="Find the longest sequence that fits.")
    ] = False,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find the largest micro-batch that fits.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for programs.")
    ] = False,
) -> None:
    """Say, before anything runs, what computes and is kept in what, how many bytes, what fits.

    Reads no data and allocates nothing: with --card it works on a laptop for any GPU and any model,
    and with --strategy for any number of GPUs. Times and what is sent are predictions.
    """
    with request():
        run = _run(run_file, overrides, model, preset)
        if lora:
            run = replace(run, lora=replace(run.lora, rank=lora))
        if gib and card:
            raise ValueError("--gib, --card: give one of them")
        card = card or (f"{gib:g}" if gib else "")
        if longest or largest_batch:
            _search(run, card, longest, as_json)
        elif strategy != "single" or gpus > 1:
            layout = (strategy, gpus, nodes, experts_over)
            _several(run, card, layout, link, dispatch, as_json)
        else:
            _alone(run, card, as_json)


def _run(run_file: Path | None, overrides, model: str, preset: str) -> Run:
    from .config import load_run, run_of_model

    if model:  # the first argument is then an override too
        run = run_of_model(model, [str(o) for o in (run_file, *(overrides or ())) if o])
    elif run_file is None:
        raise ValueError("plan: give a run file (runs/demo.toml), or --model")
    else:
        run = load_run(run_file, overrides or ())
    return run.with_preset(preset).check() if preset else run


def _search(run: Run, card: str, longest: bool, as_json: bool) -> None:
    from .planner.cards import card_of
    from .planner.search import largest_batch
    from .planner.search import longest as longest_sequence

    if not card:
        raise ValueError("--longest, --largest-batch: say what to fit into with --card or --gib")
    room = card_of(card).room_gib
    found = (longest_sequence if longest else largest_batch)(run, room)
    if as_json:
        print_json({"gib": room, "memory": found and found.to_dict()})
    elif found is None:
        what = "sequence of 256 tokens" if longest else "micro-batch of one"
        out.print(f"not even a {what} fits into {room:.1f} GiB")
    else:
        sequences, tokens = found.batch
        what = "longest sequence" if longest else "largest micro-batch"
        out.print(found)
        out.print(f"{what} in {room:.1f} GiB: {sequences} x {tokens:,} tokens", style="bold")


def _several(run: Run, card_name: str, wanted: tuple, link: str, dispatch: str, as_json: bool):
    from .planner.cards import card_of
    from .planner.page import rank_dict, rank_page
    from .planner.ranks import Layout
    from .planner.several import Several
    from .planner.speed import Links

    strategy, gpus, nodes, experts_over = wanted
    card = card_of(card_name or "h200")
    links = Links.of(link, card)
    several = Several(run, dispatch=dispatch)
    per_node = max(gpus // nodes, 1) if gpus and nodes else 8
    like = Layout(strategy=strategy)
    if gpus:  # refused before anything is rehearsed
        layout = several.sized(like, gpus, per_node)
        layout = replace(layout, nodes=nodes or layout.nodes)
        if experts_over:
            layout = replace(layout, experts_over=experts_over)
    smallest = several.smallest(like, card.room_gib, per_node)
    if not gpus and smallest is None:
        raise ValueError(f"--strategy: no number of GPUs of {card.room_gib:.1f} GiB is enough")
    layout = layout if gpus else smallest
    plan = several.plan(layout, card, links)
    if as_json:
        fewest = smallest and smallest.gpus
        print_json({**rank_dict(plan, card.room_gib), "fewest_gpus": fewest, "card": card.name})
        return
    out.print(rank_page(plan, card.room_gib, card.name))
    fewest = "no number of GPUs is enough" if smallest is None else f"{smallest.gpus} GPU(s)"
    out.print(f"fewest that fit with {strategy}: {fewest}", style="bold")


def _alone(run: Run, card_name: str, as_json: bool) -> None:
    from .planner.bars import bar, legend
    from .planner.cards import card_of
    from .planner.memory import estimate_memory
    from .train.out_of_memory import available_gib

    device = "cuda" if card_name else _device_of(run)
    known = card_of(card_name) if card_name else None
    table = None if run.lora.rank else _planned(run, device)
    if table is not None and str(run.settings.recipe).startswith("te:"):
        facts = {"plan": table.to_dict(), "memory": None, "notes": run.notes}
        return print_json(facts) if as_json else out.print(str(table))  # which says why
    memory = estimate_memory(run, device=device)
    room = known.room_gib if known else available_gib(_torch_device(device))
    # fp8-lean's states alone are the least
    hopeless = not run.lora.rank and memory.num_parameters * 4 > room * 2**30
    others = [] if hopeless or run.lora.rank else memory.advice(room)
    if as_json:
        print_json(
            {
                "plan": table and table.to_dict(),
                "memory": memory.to_dict(),
                "gib": room,
                "fits": memory.fits(room),
                "advice": [{"settings": o.settings, **o.to_dict()} for o in others],
                "notes": run.notes,
            }
        )
        return
    plain = f"{run.train.preset}: plain PyTorch, nothing in 8 bits"
    out.print(str(table) if table else plain if not run.lora.rank else "adapters on FP8 weights")
    for note in run.notes:
        out.print(f"note: {note}")
    out.print(memory)
    out.print(bar(memory.by_category, room * 2**30))
    out.print(legend())
    out.print(f"{'fits' if memory.fits(room) else 'does not fit'} into {room:.1f} GiB")
    for other in others:
        out.print(f"would fit: {other.settings} ({other.peak_gib:.2f} GiB)")
    if hopeless:
        out.print("no preset fits: 4 bytes for each parameter is the least that training takes")
    elif not others and not memory.fits(room):
        out.print("nothing that was tried fits: a shorter data.sequence_length or a smaller model")


def _device_of(run: Run) -> str:
    import torch

    if run.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return run.device


def _torch_device(name: str):
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise Refused from ValueError("--gib: no GPU here to take the size from; give it")
    return torch.device(name)


def _planned(run: Run, device: str) -> Plan | None:
    """The plan of the run's model, which is never allocated; None for a preset that has none.

    For a GPU that is not here, FP8 units are taken for granted.
    """
    import torch

    from . import prepare

    absent = device == "cuda" and not torch.cuda.is_available()
    model = prepare.build_model(run, "meta")
    table = prepare.convert_for(run, model, "cpu" if absent else device)
    return replace(table, emulated=False) if table and absent else table
