"""Tables of the attention benchmark, as text and as Markdown, from the values of its JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.tables import aligned

_OURS = "ours"
_MASK = ("block_size", "kind", "density")


def text_report(report: Mapping[str, Any]) -> str:
    """Tables for a terminal, with what could not be measured and why."""
    tables = (_speeds(report), _times_over_dense(report), _list_times(report))
    parts = [_headline(report), *(aligned(table, 4) for table in tables if len(table) > 1)]
    if len(memory := _memory(report)) > 1:
        parts.append(aligned(memory, 2))
    return "\n\n".join([*parts, "\n".join(_notes(report))]).rstrip()


def markdown_report(report: Mapping[str, Any]) -> str:
    """The same as a Markdown file."""
    lines = ["# Block-sparse attention", "", _headline(report), ""]
    sections = (
        ("TFLOP/s of valid pairs (in brackets: over the best of the others)", _speeds(report)),
        ("Time over that of the dense mask", _times_over_dense(report)),
        ("Index lists of a mask, made on the device", _list_times(report)),
        ("Memory of one call", _memory(report)),
    )
    for title, table in sections:
        if len(table) > 1:
            lines += [f"## {title}", "", *_markdown_table(table), ""]
    if notes := _notes(report):
        lines += ["## Not measured", "", *(f"- {note}" for note in notes), ""]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}.", "", f"Command: `{report['command']}`", ""])


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(row) + " |" for row in rows[1:]),
    ]


def _headline(report: Mapping[str, Any]) -> str:
    config, git = report["config"], report["git"] or {}
    commit = str(git.get("commit") or "unknown")[:12] + ("+" if git.get("dirty") else "")
    kv_heads = "" if config["kv_heads"] == config["heads"] else f" ({config['kv_heads']} for keys and values)"
    devices = ", ".join(dict.fromkeys(report["devices"]))
    return (
        f"{devices}; {config['dtype']}, {config['seqlen']} tokens, {config['heads']} heads{kv_heads} of "
        f"{config['head_dim']}; {config['rounds']} rounds of {config['budget_ms']:g} ms each; commit {commit}"
    )


def _by_mask(records: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """Records of each mask and direction by implementation."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for record in records:
        key = (*(record[field] for field in _MASK), record["direction"])
        found.setdefault(key, {})[record["implementation"]] = record
    return found


def _key_cells(key: Sequence[Any]) -> tuple[str, ...]:
    block_size, kind, density, direction = key
    return str(block_size), str(kind), f"{density:g}", str(direction)


def _names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["implementation"] for record in records))


def _speeds(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names = _names(report["records"])
    table: list[tuple[str, ...]] = [("blocks", "mask", "density", "direction", *names, "SM MHz", "W")]
    for key, found in _by_mask(report["records"]).items():
        cells = []
        for name in names:
            record = found.get(name)
            if record is None or record["tflops"] is None:
                cells.append("wrong" if record is not None and str(record["fail"]).startswith("wrong") else "-")
            else:
                ratio = record["ratio"]
                cells.append(f"{record['tflops']:.3g}" + ("" if ratio is None else f" ({ratio:.3f})"))
        gpu = next(iter(found.values()))["gpu"]
        state = (f"{gpu[field]:.0f}" if field in gpu else "-" for field in ("sm_mhz", "power_w"))
        table.append((*_key_cells(key), *cells, *state))
    return table


def _times_over_dense(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Time of a mask over that of the dense mask with the same blocks: its density, if time is spent on pairs alone."""
    names = _names(report["records"])
    by_mask = _by_mask(report["records"])
    table: list[tuple[str, ...]] = [("blocks", "mask", "density", "direction", *names)]
    for key, found in by_mask.items():
        dense = by_mask.get((key[0], "dense", 1.0, key[3]), {})
        if key[1] == "dense" or not dense:
            continue
        cells = []
        for name in names:
            ms, dense_ms = (rows.get(name, {}).get("ms") for rows in (found, dense))
            cells.append("-" if ms is None or dense_ms is None else f"{ms / dense_ms:.4f}")
        table.append((*_key_cells(key), *cells))
    return table


def _list_times(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    ours = {key: found[_OURS] for key, found in _by_mask(report["records"]).items() if _OURS in found}
    table: list[tuple[str, ...]] = [
        ("blocks", "mask", "density", "lists of", "us", "share of our forward pass"),
    ]
    for row in report["lists"]:
        key = tuple(row[field] for field in _MASK)
        ms = ours.get((*key, "forward"), {}).get("ms")
        for field, name in (("rows_us", "rows"), ("both_us", "rows and columns")):
            share = "-" if ms is None else f"{row[field] / ms / 1e3:.2%}"
            table.append((str(key[0]), str(key[1]), f"{key[2]:g}", name, f"{row[field]:.1f}", share))
    return table


def _memory(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """MiB that a call added to what was there, largest over the masks; nothing where no call used device memory."""
    table: list[tuple[str, ...]] = [("implementation", "direction", "added MiB", "peak MiB")]
    for name in _names(report["records"]):
        for direction in dict.fromkeys(record["direction"] for record in report["records"]):
            used = [
                (record["added_mib"], record["peak_mib"])
                for record in report["records"]
                if (record["implementation"], record["direction"]) == (name, direction) and record.get("peak_mib")
            ]
            if used:
                added, peak = (max(values) for values in zip(*used, strict=True))
                table.append((name, direction, f"{added:.0f}", f"{peak:.0f}"))
    return table


def _notes(report: Mapping[str, Any]) -> list[str]:
    """What has no figure and why; each reason once."""
    notes = [f"{name}: not installed: {reason}" for name, reason in report["missing"].items()]
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in report["records"]:
        if record["tflops"] is None:
            where = " ".join(_key_cells([record[field] for field in (*_MASK, "direction")]))
            reasons.setdefault((record["implementation"], str(record["fail"])), []).append(where)
    for (name, reason), cases in reasons.items():
        more = f" and {len(cases) - 2} more" if len(cases) > 2 else ""
        notes.append(f"{name} ({', '.join(cases[:2])}{more}): {reason}")
    return notes
