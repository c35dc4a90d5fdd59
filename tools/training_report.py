"""Tables of measured training steps, from the values of their JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.sp_report import commit_of, markdown_table
from tools.tables import aligned

_SAME = ("engine", "strategy", "mask", "recompute", "compile", "block_size")


def add_ratios(records: Sequence[dict[str, Any]]) -> None:
    """Adds to each record its step time over that of its relatives; None where one of the two was not measured.

    * `over_dense`: time of the dense mask, alike in all else, over its own.
    * `over_native`: its own over that of engine `native`, alike in all else; and `loss_gap`, the largest difference of
      losses over the loss, of any step.
    * `over_usp`: time of strategy `usp`, alike in all else, over its own.
    """
    for record in records:
        dense, native, usp = (_like(records, record, **{key: value}) for key, value in (
            ("mask", "dense"), ("engine", "native"), ("strategy", "usp")
        ))  # fmt: skip
        record["over_dense"] = _over(dense, record)
        record["over_native"] = _over(record, native)
        record["over_usp"] = _over(usp, record)
        record["loss_gap"] = None if native is None else _gap(native.get("loss"), record.get("loss"))


def _like(records: Sequence[dict[str, Any]], record: Mapping[str, Any], **other: str) -> dict[str, Any] | None:
    wanted = {key: record[key] for key in _SAME} | other
    found = [each for each in records if {key: each[key] for key in _SAME} == wanted]
    return found[0] if found else None


def _over(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> float | None:
    if first is None or second is None or not first.get("step_s") or not second.get("step_s"):
        return None
    return float(first["step_s"]) / float(second["step_s"])


def _gap(first: Sequence[float | None] | None, second: Sequence[float | None] | None) -> float | None:
    if not first or not second or None in first or None in second:
        return None
    pairs = [(float(a), float(b)) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def text_report(report: Mapping[str, Any]) -> str:
    """Tables for a terminal."""
    parts = [headline(report), aligned(_speeds(report), 6), aligned(_attention(report), 6)]
    return "\n\n".join([*parts, "\n".join(_notes(report))])


def markdown_report(report: Mapping[str, Any]) -> str:
    """The same as a Markdown file."""
    lines = ["# Training steps", "", headline(report), "", "## Steps", "", *markdown_table(_speeds(report)), ""]
    lines += ["## Attention and losses", "", *markdown_table(_attention(report)), ""]
    lines += [*(f"- {note}" for note in _notes(report)), ""]
    return "\n".join([*lines, f"Command: `{report['command']}`", ""])


def headline(report: Mapping[str, Any]) -> str:
    """What was measured where."""
    settings = report["settings"]
    devices = ", ".join(dict.fromkeys(report["devices"])) or "cpu"
    size = "x".join(map(str, settings["size"]))
    return (
        f"{settings['model']}, latents {size} ({report['tokens']} tokens), {settings['precision']}, batch "
        f"{settings['global_batch_size']}, on {settings['num_ranks']} x {devices}; medians of "
        f"{settings['steps'] - settings['warmup']} steps; commit {commit_of(report)}"
    )


def _names(record: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(record[key]) for key in _SAME)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speeds(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("engine", "strategy", "mask", "recompute", "compile", "block", "step s", "fastest", "slowest", "tokens/s",
         "over dense", "over usp", "of native", "MFU", "HFU", "dense equiv.", "peak GiB")
    ]  # fmt: skip
    for record in report["records"]:
        cells = [("step_s", ".3f"), ("fastest_s", ".3f"), ("slowest_s", ".3f"), ("tokens_per_s", ".0f"),
                 ("over_dense", ".2f"), ("over_usp", ".2f"), ("over_native", ".3f"), ("mfu", ".1%"), ("hfu", ".1%"),
                 ("dense_equivalent", ".1%"), ("peak_gib", ".1f")]  # fmt: skip
        table.append((*_names(record), *(_cell(record.get(key), form) for key, form in cells)))
    return table


def _attention(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("engine", "strategy", "mask", "recompute", "compile", "block", "density", "kernel ms", "of step", "forward ms",
         "exposed ms", "kernel TFLOP/s", "rho_s before", "after", "first step s", "last loss", "loss gap")
    ]  # fmt: skip
    for record in report["records"]:
        last = (record.get("loss") or [None])[-1]
        cells = [("density", ".3f"), ("kernel_ms", ".1f"), ("attention_share", ".1%"), ("attention_ms", ".1f"),
                 ("exposed_ms", ".1f"), ("attention_tflops", ".0f"), ("imbalance_before", ".3f"),
                 ("imbalance_after", ".3f"), ("first_s", ".1f")]  # fmt: skip
        found = [_cell(record.get(key), form) for key, form in cells]
        table.append((*_names(record), *found, _cell(last, ".5f"), _cell(record.get("loss_gap"), ".1e")))
    return table


def _notes(report: Mapping[str, Any]) -> list[str]:
    products, attention = (report["forward_flops"][key] / 1e12 for key in ("products", "attention"))
    peak = report["peak_tflops"]
    notes = [
        f"model operations of a step: 3 x ({products:.1f} + density x {attention:.1f}) TFLOP: every matrix product, "
        "and 4 B H D S^2 of attention a layer, of dense blocks only; MFU is over "
        + (f"{peak:g} TFLOP/s a rank" if peak else "the peak, which is not known here: give --peak-tflops"),
        "HFU counts what is carried out: 3.5 x attention, and what is recomputed; dense equiv. counts the dense "
        "model's operations over the same time, and is no use of the hardware",
        "a step is from loading its clips to its loss on the host, on rank 0; memory is what tensors took, of the rank "
        "that took most",
    ]
    for record in report["records"]:
        if record["fail"]:
            notes.append(f"{' '.join(_names(record))}: {record['fail']}")
        elif not all(isinstance(loss, float) for loss in record["loss"]):
            notes.append(f"{' '.join(_names(record))}: a loss is not finite")
    return notes
