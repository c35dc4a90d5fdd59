"""The facts of `tools/explain.py` as aligned text, for people and pipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.explain_advice import duration
from tools.explain_layout import ranks_text
from tools.tables import aligned

_MOST_ROWS = 4


def as_text(facts: dict[str, Any]) -> str:
    """Sections with a heading each, without a final newline."""
    sections = {
        "What runs": _pairs(_run(facts)),
        "Process groups": _groups(facts),
        "Tokens": _pairs(_tokens(facts)),
        **({"Pipeline": _pipeline(facts)} if facts["mesh"]["pipeline"] > 1 else {}),
        "Memory of a rank": _memory(facts),
        "Predicted time": _pairs(_time(facts)),
        "Meshes, fastest first (attention of a layer, forward and backward)": _meshes(facts),
        "Assumed": _listed(facts["time"]["assumptions"]),
        "Warnings": _advice(facts["warnings"]) or "  none",
        "Better settings": _advice(facts["better"]) or "  none found",
    }
    return "\n\n".join(f"{heading}\n{body}" for heading, body in sections.items())


def _pairs(facts: dict[str, str]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"  {key:<{width}}  {value}" for key, value in facts.items())


def _indented(table: str) -> str:
    return "\n".join(f"  {line}" for line in table.splitlines())


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"  - {line}" for line in lines)


def _advice(entries: Sequence[dict[str, str]]) -> str:
    return "\n".join(f"  ! {entry['what']}\n    -> {entry['remedy']}" for entry in entries)


def _run(facts: dict[str, Any]) -> dict[str, str]:
    run, mesh = facts["run"], facts["mesh"]
    kv = f" ({run['kv_heads']} K/V heads)" if run["kv_heads"] != run["heads"] else ""
    nodes = f"{len(mesh['hosts'])} node(s) of {mesh['gpus_per_node']}"
    split = f" x {mesh['tensor']} tensor parallel" if mesh["tensor"] > 1 else ""
    split += f" x {mesh['pipeline']} pipeline ranks" if mesh["pipeline"] > 1 else ""
    chosen = ", by layer at run time; shown is the one predicted to be fastest" if mesh["chosen_by_layer"] else ""
    return {
        "run": f"{run['name']}: {run['steps']} steps, {run['precision']}",
        "model": f"{run['model']}: {run['parameters']:,} parameters, {run['layers']} layers, {run['heads']} heads of "
        f"{run['head_dim']}{kv}",
        "processes": f"{mesh['world_size']} = {mesh['data']} data x {mesh['sequence']} sequence parallel{split}, "
        f"{nodes}",
        "mesh": f"{mesh['strategy']}: {mesh['ulysses']} ulysses x {mesh['ring']} ring{chosen}",
        "batch": f"{run['global_batch_size']} clips a step = {mesh['data']} x {run['micro_batches']} micro-batches of "
        f"{run['micro_batch_size']}",
        "recompute": run["recompute"],
        "compile": "norms, modulation and rotary embedding; the first step takes longer" if run["compile"] else "no",
        "checkpoints": (f"every {run['checkpoint_every']} steps" if run["checkpoint_every"] else "at the end only")
        + f", {_size(run['checkpoint_bytes'])} each",
        "mask": f"{facts['masks']['method']}; density {facts['masks']['density']:.3f} "
        f"({'measured' if facts['masks']['measured'] else 'expected'})",
        "": facts["masks"]["source"],
    }


def _groups(facts: dict[str, Any]) -> str:
    table: list[Sequence[str]] = [("kind", "ranks", "nodes", "inside one node", "what goes through it")]
    for kind in facts["groups"]:
        if kind["size"] == 1:
            continue
        number, across = kind["num_groups"], kind["num_across_nodes"]
        inside = "yes" if not across else f"no ({across} of {number} cross)"
        table.append((f"{kind['name']}, {number} of {kind['size']}", "", "", inside, kind["purpose"]))
        shown = list(zip(kind["groups"], kind["nodes"], strict=True))[:_MOST_ROWS]
        table += [("", ranks_text(ranks), _few(nodes), "", "") for ranks, nodes in shown]
        if number > len(shown):
            table.append(("", f"... {number - len(shown)} more", "", "", ""))
    return _indented(aligned(table, 5)) if len(table) > 1 else "  none: one process"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_ROWS else f"{', '.join(names[:2])}, ... {names[-1]}"


def _tokens(facts: dict[str, Any]) -> dict[str, str]:
    tokens = facts["tokens"]
    frames, rows, columns = tokens["grid"]
    text = f"{tokens['text_tokens']} text + " if tokens["text_tokens"] else ""
    later = ", evened out by measured counts as the run goes on" if tokens["evened_out"] else ""
    return {
        "sequence": f"{tokens['num_tokens']} tokens ({text}{frames} x {rows} x {columns} patches), "
        f"{tokens['num_blocks']} blocks of {tokens['block_size']}",
        "layout": f"{tokens['policy']}{later}",
        "tokens per rank": _span(tokens["tokens"]),
        "blocks per rank": _span(tokens["blocks"]),
    }


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _pipeline(facts: dict[str, Any]) -> str:
    """Stages and memory of each pipeline rank."""
    virtual = facts["mesh"]["virtual"]
    said = "  one stage on each rank"
    if virtual > 1:
        said = f"  {virtual} stages on each rank in turns (interleaved): shorter idle times, more activations kept"
    table: list[Sequence[str]] = [("rank", "layers", "micro-batches kept, at most", "memory")]
    for rank in facts["pipeline"]:
        layers = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in rank["layers"])
        passes = " + ".join(str(count) for count in rank["passes"])
        table.append((str(rank["rank"]), layers, passes, _size(rank["total_bytes"])))
    return f"{said}\n{_indented(aligned(table, 4))}"


def _memory(facts: dict[str, Any]) -> str:
    memory = facts["memory"]
    table: list[Sequence[str]] = [("for", "size", "", "how")]
    table += [
        (part["name"], _size(part["num_bytes"]), "exact" if part["exact"] else "estimate", part["note"])
        for part in memory["parts"]
    ]
    device = memory["device_gib"]
    of = "" if device is None else f"of {device:g} GiB"
    table.append(("together", _size(memory["total_bytes"]), "estimate", of))
    width = max(len(row[1]) for row in table)
    rows = [(row[0], row[1].rjust(width), *row[2:]) for row in table]
    return _indented(aligned(rows, 4))


def _time(facts: dict[str, Any]) -> dict[str, str]:
    time = facts["time"]
    layer = time["forward_ms"] + time["backward_ms"]
    reduce = "not known" if time["reduce_ms"] is None else _ms(time["reduce_ms"])
    speedup = time["alone_ms"] / layer if layer else 1.0
    said = {
        "rates": f"{'measured' if time['measured'] else 'assumed'}: {time['machine']}",
        "attention of a layer": f"{_ms(time['forward_ms'])} forward, {_ms(time['backward_ms'])} backward: "
        f"{speedup:.3g} times as fast as one rank alone ({_ms(time['alone_ms'])})",
        "attention of a step": _ms(time["attention_ms"]),
        "other layers": _ms(time["other_ms"]),
        "sum of gradients": f"{reduce}, {_ms(time['exposed_reduce_ms'])} of it in the open",
        "step": f"{_ms(time['step_ms'])}, the whole run {duration(time['run_s'])}",
    }
    return said if time["job_s"] is None else said | {"job": f"ends after {duration(time['job_s'])}"}


def _meshes(facts: dict[str, Any]) -> str:
    table: list[Sequence[str]] = [
        ("ulysses x ring", "", "usp", "dbsp", "auto", "rho_s before", "after", "MiB in nodes", "between nodes")
    ]
    mesh = facts["mesh"]
    for option in facts["meshes"]:
        used = (option["ulysses_degree"], option["ring_degree"]) == (mesh["ulysses"], mesh["ring"])
        table.append(
            (
                f"{option['ulysses_degree']} x {option['ring_degree']}",
                "used" if used else "",
                *(_ms(option[f"{strategy}_ms"]) for strategy in ("usp", "dbsp", "auto")),
                f"{option['rho_before']:.3f}",
                f"{option['rho_after']:.3f}",
                f"{option['mib_inside_nodes']:.2f}",
                f"{option['mib_between_nodes']:.2f}",
            )
        )
    return _indented(aligned(table, 2))


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1e3 else duration(milliseconds / 1e3)


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
