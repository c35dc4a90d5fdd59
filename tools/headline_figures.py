"""Figures of the headline comparison, from the values of its JSON files: one line a case, one a measurement."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.sp_entries import UNBALANCED
from tools.sp_report import ratio

OURS, PAPER = "dbsp", "paper"
_CASE = ("num_ranks", "shape", "block_size", "mask", "direction")
_KEPT = (*_CASE, "density", "strategy", "mesh", "ms", "ideal_ms", "efficiency", "exposed", "rho_before", "rho_after",
         "num_chunks", "predicted_ms", "prediction_error", "fail")  # fmt: skip

Record = dict[str, Any]


def measured_records(reports: Iterable[Mapping[str, Any]], emulated: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Every measurement of bench_sp with what was emulated for it.

    Args:
        reports: values of its JSON files.
        emulated: those of emulate_ranks.

    Returns:
        Records of the former with `emulated_ms`, in as many chunks of heads as ran or else in those that were chosen,
        and `over_emulated`, measured over emulated; None where nothing was.
    """
    known = _by_plan(emulated)
    found = []
    for report in reports:
        for record in report["records"]:
            kept = {key: record.get(key) for key in _KEPT}
            kept["emulated_ms"] = _emulated_ms(record, known)
            kept["over_emulated"] = ratio(kept["ms"], kept["emulated_ms"])
            found.append(kept)
    return found


def _by_plan(emulated: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    found = {}
    for report in emulated:
        for record in report["records"]:
            mask = f"{record['kind']} {record['density']:g} seed {record['seed']}"
            case = (record["sp_degree"], report["shape"], report["block_size"], mask)
            found[(*case, record["strategy"], record["mesh"])] = record
    return found


def _emulated_ms(record: Mapping[str, Any], known: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> float | None:
    key = tuple(record[name] for name in (*_CASE[:-1], "strategy", "mesh"))
    emulated = known.get(key)
    if emulated is None:
        return None
    chunks = "in_chunks" if (record.get("num_chunks") or 1) > 1 else "one_chunk"
    if record["direction"] == "forward":
        return float(emulated[f"{chunks}_forward_ms"])
    return float(emulated[f"{chunks}_ms"]) if "backward_ms" in emulated else None


def case_lines(records: Sequence[Record]) -> list[Record]:
    """One line for each mask and direction: dbsp on its fastest mesh beside the others on theirs.

    `over_best_unbalanced` and `over_paper` are times of the others over ours. `regret` is how much longer dbsp takes on
    the mesh that was predicted to be its fastest. `emulated_speedup` is `over_best_unbalanced` of emulated times.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in _CASE), []).append(record)
    return [dict(zip(_CASE, case, strict=True)) | _line(found) for case, found in groups.items()]


def _line(records: Sequence[Record]) -> Record:
    ours = [record for record in records if record["strategy"] == OURS]
    plain = [record for record in records if record["strategy"] in UNBALANCED]
    best, unbalanced = _least(ours, "ms"), _least(plain, "ms")
    paper = _least([record for record in records if record["strategy"] == PAPER], "ms")
    expected = _least([record for record in ours if record["ms"] is not None], "predicted_ms")
    emulated, emulated_plain = _least(ours, "emulated_ms"), _least(plain, "emulated_ms")
    ms = _of(best, "ms")
    taken = ("mesh", "efficiency", "exposed", "rho_before", "rho_after", "predicted_ms", "prediction_error",
             "emulated_ms", "over_emulated")  # fmt: skip
    regret = ratio(_of(expected, "ms"), ms)
    return {
        "density": records[0]["density"],
        "ms": ms,
        **{name: _of(best, name) for name in taken},
        "unbalanced": _of(unbalanced, "strategy"),
        "unbalanced_mesh": _of(unbalanced, "mesh"),
        "unbalanced_ms": _of(unbalanced, "ms"),
        "unbalanced_rho": _of(unbalanced, "rho_after"),
        "paper_mesh": _of(paper, "mesh"),
        "paper_ms": _of(paper, "ms"),
        "over_best_unbalanced": ratio(_of(unbalanced, "ms"), ms),
        "over_paper": ratio(_of(paper, "ms"), ms),
        "predicted_mesh": _of(expected, "mesh"),
        "regret": None if regret is None else regret - 1,
        "emulated_speedup": ratio(_of(emulated_plain, "emulated_ms"), _of(emulated, "emulated_ms")),
        "num_failed": sum(record["ms"] is None for record in records),
    }


def _least(records: Sequence[Record], name: str) -> Record | None:
    return min((record for record in records if record[name] is not None), key=lambda r: float(r[name]), default=None)


def _of(record: Record | None, name: str) -> Any:
    return None if record is None else record[name]


def summary_lines(cases: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """Means over the masks of each number of GPUs, shape and direction.

    Args:
        cases: of `case_lines`.
        records: of `measured_records`.
    """
    names = ("num_ranks", "shape", "direction")
    lines = []
    for key in dict.fromkeys(tuple(case[name] for name in names) for case in cases):
        mine = [case for case in cases if tuple(case[name] for name in names) == key]
        all_of_it = [record for record in records if tuple(record[name] for name in names) == key]
        gains = _known(mine, "over_best_unbalanced")
        lines.append(
            dict(zip(names, key, strict=True))
            | {
                "num_cases": len(mine),
                "least": min(gains, default=None),
                "mean": _mean(gains),
                "largest": max(gains, default=None),
                "over_paper": _mean(_known(mine, "over_paper")),
                "efficiency": _mean(_known(mine, "efficiency")),
                "exposed": _mean(_known(mine, "exposed")),
                "rho_before": _mean(_known(mine, "rho_before")),
                "rho_after": _mean(_known(mine, "rho_after")),
                "prediction_error": _mean([abs(x) for x in _known(all_of_it, "prediction_error")]),
                "regret": _mean(_known(mine, "regret")),
                "over_emulated": _mean(_known(all_of_it, "over_emulated")),
                "emulated_speedup": _mean(_known(mine, "emulated_speedup")),
            }
        )
    return lines


def _known(lines: Sequence[Record], name: str) -> list[float]:
    return [float(line[name]) for line in lines if line[name] is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
