"""One self-contained HTML page of a run, or of several side by side: no script, and nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from .atomic_file import write_text
from .html_charts import Line, bar_chart, category_map, heat_map, line_chart, number
from .html_style import PAGE
from .layer_log import layer_table
from .metric_names import METRICS
from .redact import redact_command
from .run_record import RunRecord, read_run

_MOST_PICTURES = 4


def write_report(folders: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """Write the page of one or several run folders, atomically.

    Args:
        folders: run folders; a run may have been cut short, or be going on.
        output: HTML file.

    Raises:
        ValueError: no folder, or a folder holds no metrics.jsonl.
    """
    if not folders:
        raise ValueError("no run folder given; name at least one, such as runs/demo")
    write_text(output, report_page([read_run(folder) for folder in folders]))


def report_page(runs: Sequence[RunRecord]) -> str:
    """The page of some runs."""
    if len(runs) == 1:
        title, body = runs[0].name, _run_sections(runs[0])
    else:
        title = " / ".join(run.name for run in runs)
        parts = [_section("compare", "Runs side by side", _comparison(runs))]
        for index, run in enumerate(runs):
            parts.append(f'<details id="run-{index}"><summary>{escape(run.name)}</summary>')
            parts.append(_run_sections(run, f"run-{index}-"))
            parts.append("</details>")
        body = "".join(parts)
    # At once: a title or body may hold the other's placeholder.
    return re.sub(r"\$(TITLE|BODY)", lambda found: {"TITLE": escape(title), "BODY": body}[found[1]], PAGE)


SECTIONS: tuple[tuple[str, str], ...] = (
    ("header", "What ran"),
    ("warnings", "Warnings"),
    ("loss", "Loss"),
    ("balance", "Imbalance before and after plans"),
    ("layers", "Imbalance of each layer"),
    ("loads", "Load of each rank"),
    ("meshes", "Mesh of each layer"),
    ("plans", "Plan reuse and regret"),
    ("prediction", "Predicted and measured attention time"),
    ("traffic", "Bytes by kind of link"),
    ("stragglers", "Slowest rank"),
    ("memory", "Memory"),
    ("partition", "Masks, and who computes them"),
    ("numbers", "All numbers"),
    ("config", "Configuration"),
)
"""Sections of a run, by id, in order."""


def _run_sections(run: RunRecord, prefix: str = "") -> str:
    makers: dict[str, Callable[[RunRecord], str]] = {
        "header": _header,
        "warnings": _warnings,
        "loss": _loss,
        "balance": _balance,
        "layers": _layers,
        "loads": _loads,
        "meshes": _meshes,
        "plans": _plans,
        "prediction": _prediction,
        "traffic": _traffic,
        "stragglers": _stragglers,
        "memory": _memory,
        "partition": _partition,
        "numbers": _numbers,
        "config": lambda run: f"<details><summary>config.yaml</summary><pre>{escape(run.config_text)}</pre></details>",
    }
    return "".join(_section(prefix + name, title, _guarded(makers[name], run)) for name, title in SECTIONS)


def _guarded(make: Callable[[RunRecord], str], run: RunRecord) -> str:
    """What is known of a run is shown, although a part of its files is damaged or was written by something else."""
    try:
        return make(run)
    except (AttributeError, KeyError, IndexError, OverflowError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        return f"<p>Cannot be drawn: a file of the run is damaged ({escape(type(error).__name__)}: {escape(said)}).</p>"


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>'


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    top = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _facts(facts: Sequence[tuple[str, Any]]) -> str:
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts if value is not None
    )
    return f'<div class="wide"><table class="facts">{lines}</table></div>'


def _header(run: RunRecord) -> str:
    environment, steps = run.environment, run.get("train", "steps")
    last = run.rows[-1]["step"] if run.rows else 0
    git = environment.get("git") or {}
    commit = git.get("commit")
    packages = environment.get("packages") or {}
    versions = ", ".join(
        f"{name} {packages[name]}"
        for name in ("dbsp_megatron", "torch", "triton", "megatron-core")
        if packages.get(name)
    )
    command = environment.get("command")
    return _facts(
        [
            ("run", run.name),
            ("state", "finished" if run.done else "not finished: cut short, stopped or going on"),
            ("steps", f"{last} of {steps}" if steps else last),
            ("model", run.get("model")),
            ("strategy", run.last("sp/strategy") or run.get("sp", "strategy")),
            ("mesh", run.last("sp/mesh")),
            ("mask", run.get("mask", "method")),
            ("processes", environment.get("world_size")),
            ("devices", ", ".join(environment.get("devices") or []) or None),
            ("host", environment.get("hostname")),
            ("versions", versions or None),
            ("Python", environment.get("python")),
            ("source", f"{commit[:12]}{' with changes' if git.get('dirty') else ''}" if commit else None),
            ("command", " ".join(redact_command(list(map(str, command)))) if isinstance(command, list) else None),
            ("final check", "; ".join((run.summary.get("check") or {}).get("faults") or []) or None),
        ]
    )


def _warnings(run: RunRecord) -> str:
    lost = [(row["step"], ", ".join(row["nonfinite"])) for row in run.rows if "train/loss" in row.get("nonfinite", ())]
    rows = [(alert.step, alert.title, alert.text) for alert in run.alerts]
    rows += [(step, "not finite", keys) for step, keys in lost[:20]]
    if not rows:
        return '<p class="good">No limit of <code>wandb.alert_*</code> was passed, and every loss was finite.</p>'
    return _table(("step", "warning", "detail"), sorted(rows))


def _line(run: RunRecord, key: str, label: str, colour: int, *, scale: float = 1.0, dashed: bool = False) -> Line:
    steps, values = run.series(key)
    return Line(label, steps, [value * scale for value in values], colour, dashed)


def _loss_lines(run: RunRecord) -> list[Line]:
    return [_line(run, "train/loss", "train", 0), _line(run, "eval/loss", "eval", 1)]


def _loss(run: RunRecord) -> str:
    chart = line_chart(_loss_lines(run), y_label="loss (squared error)")
    keys = ("train/loss", "eval/loss", "train/grad_norm", "train/lr", "perf/step_s", "perf/tokens_per_s",
            "perf/data_ms")  # fmt: skip
    return _side_by_side(chart, _numbers_of(run, keys))


def _balance(run: RunRecord) -> str:
    chart = line_chart(
        [
            _line(run, "sp/imbalance_before", "before, mean of layers", 1),
            _line(run, "sp/imbalance_before_max", "before, worst layer (dashed)", 1, dashed=True),
            _line(run, "sp/imbalance_after", "after, mean of layers", 0),
            _line(run, "sp/imbalance_after_max", "after, worst layer (dashed)", 0, dashed=True),
        ],
        y_label="rho_s (max / mean load)",
        floor=1.0,
    )
    keys = ("sp/imbalance_before", "sp/imbalance_before_max", "sp/imbalance_after", "sp/imbalance_after_max",
            "sp/imbalance_gpu")  # fmt: skip
    return _side_by_side(chart, _numbers_of(run, keys))


def _layers(run: RunRecord) -> str:
    parts = []
    tables = {field: layer_table(run.layers, field) for field in ("imbalance_before", "imbalance_after")}
    found = [values[np.isfinite(values)] for _, _, values in tables.values()]
    # One scale, so that both can be compared.
    high = max((float(values.max()) for values in found if values.size), default=1.0)
    for field, label in (("imbalance_before", "rho_s before"), ("imbalance_after", "rho_s after")):
        steps, layers, values = tables[field]
        parts.append(heat_map(steps, layers, values, label=label, low=1.0, high=high))
    return _side_by_side(*parts)


def _loads(run: RunRecord) -> str:
    loads, times = run.last("sp/rank_load") or [], run.last("sp/rank_kernel_ms") or []
    known = [[float(value) for value in values if value is not None] for values in (loads, times)]
    return (
        _side_by_side(
            bar_chart(known[0], x_label="sp rank", y_label="dense blocks, all layers"),
            bar_chart(known[1], x_label="rank", y_label="attention kernels, ms"),
        )
        + "<p>Newest logged step. Left: what the plans give each rank. Right: what its kernels took, "
        "forward and backward.</p>"
    )


def _meshes(run: RunRecord) -> str:
    if not run.layers:
        return '<p class="none">No layers.jsonl in this run folder.</p>'
    layers = sorted({layer for row in run.layers for layer in row["layer"]})
    names = []
    for row in run.layers:
        held = dict(zip(row["layer"], row.get("mesh", ()), strict=False))
        names.append([str(held.get(layer, "")) for layer in layers])
    chart = category_map([row["step"] for row in run.layers], layers, names, label="mesh")
    counts = Counter(names[-1]).most_common()
    return _side_by_side(chart, _table(("mesh, newest step", "layers"), counts))


def _plans(run: RunRecord) -> str:
    return _side_by_side(
        line_chart([_line(run, "sp/plan_reuse", "reuse", 0)], y_label="plans kept, fraction", floor=0.0),
        line_chart([_line(run, "sp/plan_regret", "regret", 1)], y_label="regret, balanced calls", floor=0.0),
    ) + _numbers_of(run, ("sp/plan_reuse", "sp/plan_regret", "sp/replans_per_step", "sp/mesh_changes"))


def _prediction(run: RunRecord) -> str:
    return _side_by_side(
        line_chart(
            [_line(run, "sp/measured_ms", "measured", 0), _line(run, "sp/predicted_ms", "predicted", 1)],
            y_label="attention, forward, ms",
            floor=0.0,
        ),
        line_chart([_line(run, "sp/prediction_error", "error", 1, scale=100)], y_label="predicted - measured, %"),
    ) + _numbers_of(run, ("sp/measured_ms", "sp/predicted_ms", "sp/prediction_error", "perf/attention_tflops"))


def _traffic(run: RunRecord) -> str:
    mib = 2.0**-20
    chart = line_chart(
        [
            _line(run, "sp/bytes_in_node", "in nodes, all ranks, by plan", 0, scale=mib),
            _line(run, "sp/bytes_between_nodes", "between nodes, all ranks, by plan", 1, scale=mib),
            _line(run, "sp/bytes_sent", "rank 0, measured", 2, scale=mib),
        ],
        y_label="MiB per step",
        floor=0.0,
    )
    keys = ("sp/bytes_in_node", "sp/bytes_between_nodes", "sp/bytes_sent", "sp/bytes_sent_max", "sp/exposed_ms",
            "sp/exposed_ms_max")  # fmt: skip
    return _side_by_side(chart, _numbers_of(run, keys))


def _stragglers(run: RunRecord) -> str:
    steps, values = run.series("sp/slowest_rank")
    counts = Counter(int(value) for value in values if value == value).most_common(8)
    chart = line_chart([_line(run, "sp/slowest_excess", "excess", 1, scale=100)], y_label="slowest over mean, %",
                       floor=0.0)  # fmt: skip
    rows = [(rank, count, f"{count / len(steps):.0%}") for rank, count in counts]
    return _side_by_side(chart, _table(("slowest rank", "logged steps", "share"), rows) if rows else "")


def _memory(run: RunRecord) -> str:
    lines = [_line(run, "mem/peak_gib", "rank 0", 0), _line(run, "mem/peak_gib_max", "fullest rank", 1)]
    chart = line_chart(lines, y_label="peak, GiB", floor=0.0)
    return _side_by_side(chart, _numbers_of(run, ("mem/peak_gib", "mem/peak_gib_max")))


def _partition(run: RunRecord) -> str:
    pictures = run.partitions[:_MOST_PICTURES]
    if not pictures:
        return (
            '<p class="none">No pictures: they are drawn at the end of a run with <code>run.plots=true</code>, or by '
            "<code>tools/plot_metrics.py</code>.</p>"
        )
    parts = []
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        name = escape(picture.stem.replace("_", " "))
        parts.append(f'<figure><img alt="{name}" src="data:image/png;base64,{data}"/></figure>')
    return f'<div class="pair pictures">{"".join(parts)}</div>'


def _numbers(run: RunRecord) -> str:
    body = _numbers_of(run, tuple(METRICS), with_meaning=True)
    return f"<details><summary>Every metric, its unit and meaning</summary>{body}</details>"


def _numbers_of(run: RunRecord, keys: Sequence[str], *, with_meaning: bool = False) -> str:
    """A table of metrics; without a column for it, the meaning shows when the pointer rests on a name."""
    lines = []
    for key in keys:
        metric = METRICS[key]
        if metric.kind == "list" or run.last(key) is None:
            continue
        mean = "-" if metric.kind == "text" else number(run.mean(key))
        cells = [number(run.last(key)), mean, metric.unit]
        cells += [metric.better or "-", metric.meaning] if with_meaning else []
        name = f'<td title="{escape(metric.meaning)}">{escape(key)}</td>'
        lines.append(f"<tr>{name}{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>")
    if not lines:
        return ""
    head = ("metric", "last", "mean", "unit", *(("better", "meaning") if with_meaning else ()))
    top = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _side_by_side(*parts: str) -> str:
    return '<div class="pair">' + "".join(f"<figure>{part}</figure>" for part in parts) + "</div>"


def _comparison(runs: Sequence[RunRecord]) -> str:
    loss = [_line(run, "train/loss", run.name, index % 8) for index, run in enumerate(runs)]
    rho = [_line(run, "sp/imbalance_after", f"{run.name}, after", index % 8) for index, run in enumerate(runs)]
    rho += [
        _line(run, "sp/imbalance_before", f"{run.name}, before (dashed)", index % 8, dashed=True)
        for index, run in enumerate(runs)
    ]
    keys = ("train/loss", "eval/loss", "sp/imbalance_before", "sp/imbalance_after", "sp/imbalance_after_max",
            "sp/plan_reuse", "sp/density", "sp/attention_ms", "sp/exposed_ms", "sp/slowest_excess", "sp/bytes_sent",
            "perf/step_s", "perf/tokens_per_s", "mem/peak_gib_max")  # fmt: skip
    rows: list[list[Any]] = [["state", "", *("finished" if run.done else "not finished" for run in runs)]]
    rows.append(["logged steps", "", *(len(run.rows) for run in runs)])
    rows.append(["mesh", "", *(run.last("sp/mesh") or "-" for run in runs)])
    rows += [
        [f"{key}, {'last' if key.endswith('loss') else 'mean'}", METRICS[key].unit,
         *(number(run.last(key) if key.endswith("loss") else run.mean(key)) for run in runs)]
        for key in keys
        if any(run.last(key) is not None for run in runs)
    ]  # fmt: skip
    return (
        '<div class="pair"><figure><h3>Loss</h3>'
        + line_chart(loss, y_label="loss (squared error)")
        + "</figure><figure><h3>Imbalance</h3>"
        + line_chart(rho, y_label="rho_s (max / mean load)", floor=1.0)
        + "</figure></div>"
        + _table(("", "unit", *(run.name for run in runs)), rows)
    )
