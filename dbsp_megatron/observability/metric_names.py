"""Every number that a training run logs: name, unit, meaning, and which direction is better.

`python -m dbsp_megatron.observability.metric_names docs/metrics.md` rewrites the tables of the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .atomic_file import write_text

GROUPS = {
    "train": "Training",
    "eval": "Evaluation",
    "perf": "Speed",
    "mem": "Memory",
    "sp": "Sequence parallelism and balance",
}
MOST_CHARTED = 64
"""Lists longer than this stay in metrics.jsonl and make no charts."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One key of metrics.jsonl, or one field of layers.jsonl."""

    name: str
    unit: str
    meaning: str
    better: Literal["lower", "higher", ""] = ""
    kind: Literal["number", "text", "list"] = "number"
    summary: Literal["last", "min", "mean"] = "last"
    """What W&B shows of a finished run."""


def _metric(name: str, unit: str, meaning: str, better: Any = "", **options: Any) -> Metric:
    return Metric(name=name, unit=unit, meaning=meaning, better=better, **options)


_ALL = (
    _metric("train/loss", "squared error", "Loss of the step, mean over all elements of all ranks.", "lower",
            summary="min"),
    _metric("train/lr", "1", "Learning rate of the step."),
    _metric("train/grad_norm", "1", "Global gradient norm before clipping."),
    _metric("eval/loss", "squared error", "Loss on held-out clips, at noises and timesteps that stay the same.",
            "lower", summary="min"),
    _metric("perf/step_s", "s", "Time of a step on rank 0, waiting for data included; mean of the steps since the last "
            "logged one.", "lower", summary="mean"),
    _metric("perf/tokens_per_s", "tokens/s", "Video tokens of the global batch over the time of a step; of the steps "
            "since the last logged one.", "higher", summary="mean"),
    _metric("perf/data_ms", "ms", "Time that a step waited for its clips, noise and timesteps on rank 0; mean of the "
            "steps since the last logged one.", "lower", summary="mean"),
    _metric("perf/data_ms_max", "ms", "The same of the rank that waited longest.", "lower", summary="mean"),
    _metric("perf/attention_tflops", "TFLOP/s", "Speed of rank 0 while its attention kernels run: operations of dense "
            "blocks, short last blocks counted whole, over sp/kernel_ms. All micro-batches count as the last one.",
            "higher", summary="mean"),
    _metric("mem/peak_gib", "GiB", "Highest memory use of rank 0 since its start: device memory that tensors took, or "
            "the process on a CPU.", "lower"),
    _metric("mem/peak_gib_max", "GiB", "The same of the rank that took most.", "lower"),
    _metric("sp/strategy", "name", "sp.strategy.", kind="text"),
    _metric("sp/mesh", "mesh:layers", "Meshes in use and how many layers run on each, as in `U4R2:30 U8R1:10`.",
            kind="text"),
    _metric("sp/ulysses_degree", "ranks", "Ulysses degree U of most layers."),
    _metric("sp/ring_degree", "ranks", "Ring degree R of most layers."),
    _metric("sp/imbalance_before", "max / mean", "Imbalance rho_s without plans (contiguous heads and blocks), mean of "
            "layers; ranks of a ring wait at every step. 1 is perfect."),
    _metric("sp/imbalance_before_max", "max / mean", "The same, of the worst layer."),
    _metric("sp/imbalance_after", "max / mean", "Imbalance rho_s under the plans in use, mean of layers.", "lower",
            summary="mean"),
    _metric("sp/imbalance_after_max", "max / mean", "The same, of the worst layer; what `wandb.alert_imbalance` "
            "watches.", "lower", summary="mean"),
    _metric("sp/imbalance_gpu", "max / mean", "Total dense blocks of the fullest rank over the mean, under the plans; "
            "below sp/imbalance_after where ring steps need not wait for one another.", "lower", summary="mean"),
    _metric("sp/plan_reuse", "fraction", "Decisions that kept a plan, over all since the start of the process.",
            "higher"),
    _metric("sp/plan_regret", "time of a balanced call", "What kept plans lost against fresh ones, mean of decisions.",
            "lower"),
    _metric("sp/replans_per_step", "plans/step", "Fresh plans per step since the start of the process.", "lower"),
    _metric("sp/mesh_changes", "changes", "Layers that went to another mesh since the start of the process "
            "(sp.strategy=auto)."),
    _metric("sp/density", "fraction", "Dense blocks over all blocks, mean of layers."),
    _metric("sp/bytes_sent", "bytes", "Sent by rank 0 in the step by attention, forward and backward, mask summaries "
            "included.", "lower", summary="mean"),
    _metric("sp/bytes_sent_max", "bytes", "The same of the rank that sent most.", "lower", summary="mean"),
    _metric("sp/bytes_in_node", "bytes", "What the plans of the step send between ranks of one node in forward passes, "
            "sum of all ranks of rank 0's sequence; K/V of rings counted whole.", "lower", summary="mean"),
    _metric("sp/bytes_between_nodes", "bytes", "The same between ranks of different nodes (LOCAL_WORLD_SIZE ranks "
            "make a node, 8 if no launcher says).", "lower", summary="mean"),
    _metric("sp/attention_ms", "ms", "Forward time of all attention layers on rank 0: exchanges, masks, kernels, "
            "waiting; recompute counts again.", "lower", summary="mean"),
    _metric("sp/kernel_ms", "ms", "Time in which attention kernels ran on rank 0, forward and backward.", "lower",
            summary="mean"),
    _metric("sp/exposed_ms", "ms", "Part of sp/attention_ms in which no attention kernel ran on rank 0: exchanges that "
            "nothing hides, waiting for other ranks, packing, predicting masks. Upper bound of exposed communication.",
            "lower", summary="mean"),
    _metric("sp/exposed_ms_max", "ms", "The same of the rank where it is longest.", "lower", summary="mean"),
    _metric("sp/measured_ms", "ms", "sp/attention_ms, beside sp/predicted_ms.", "lower", summary="mean"),
    _metric("sp/predicted_ms", "ms", "Forward time that the latency model expects (sp.strategy=auto), else that of the "
            "step's blocks at the rate of the step before; null in the first step."),
    _metric("sp/prediction_error", "fraction", "sp/predicted_ms over sp/measured_ms, minus 1; 0 is perfect. What "
            "`wandb.alert_prediction_error` watches with sp.strategy=auto."),
    _metric("sp/rank_load", "dense blocks", "Load of every rank of rank 0's sequence, sum of layers, last micro-batch.",
            kind="list"),
    _metric("sp/rank_kernel_ms", "ms", "sp/kernel_ms of every rank of the world.", kind="list"),
    _metric("sp/slowest_rank", "rank", "Straggler: the rank of the world with the largest sp/kernel_ms. Attention time "
            "as a whole is alike on all ranks, as the others wait for it."),
    _metric("sp/slowest_excess", "fraction", "Its sp/kernel_ms over the mean of all ranks, minus 1.", "lower",
            summary="mean"),
)  # fmt: skip
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}
"""Keys of metrics.jsonl, W&B and TensorBoard, by name."""

_FIELDS = (
    _metric("layer", "index", "Attention layer."),
    _metric("mesh", "mesh", "Mesh of the last call, as in `U4R2`.", kind="text"),
    _metric("imbalance_before", "max / mean", "As sp/imbalance_before."),
    _metric("imbalance_after", "max / mean", "As sp/imbalance_after.", "lower"),
    _metric("imbalance_gpu", "max / mean", "As sp/imbalance_gpu.", "lower"),
    _metric("reused", "0 or 1", "Whether the plan of an earlier step was kept."),
    _metric("density", "fraction", "Dense blocks over all blocks."),
    _metric("moved_q_fraction", "fraction", "(Head, q-block) rows computed on another ring rank than the one that "
            "holds them."),
    _metric("bytes_sent", "bytes", "Sent by rank 0 in forward passes.", "lower"),
    _metric("attention_ms", "ms", "As sp/attention_ms.", "lower"),
    _metric("kernel_ms", "ms", "As sp/kernel_ms.", "lower"),
    _metric("exposed_ms", "ms", "As sp/exposed_ms.", "lower"),
    _metric("predicted_ms", "ms", "What the latency model expects; null without one."),
)  # fmt: skip
LAYER_FIELDS: Mapping[str, Metric] = {metric.name: metric for metric in _FIELDS}
"""Fields of layers.jsonl beside `step`; each holds a list with one entry for each layer."""


def charted(values: Mapping[str, Any]) -> dict[str, Any]:
    """What W&B and TensorBoard show of a step: a list becomes one key for each entry, as in `sp/rank_load/0`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, list):
            flat[key] = value
        elif len(value) <= MOST_CHARTED:
            flat |= {f"{key}/{index}": entry for index, entry in enumerate(value)}
    return flat


def metric_table(metrics: Iterable[Metric]) -> str:
    """A Markdown table."""
    lines = ["| name | unit | better | meaning |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.unit} | {m.better or '-'} | {m.meaning} |" for m in metrics]
    return "\n".join(lines)


def reference_tables() -> dict[str, str]:
    """Tables of docs/metrics.md by the name of their place."""
    tables = {group: metric_table(metric for metric in _ALL if metric.name.startswith(f"{group}/")) for group in GROUPS}
    return tables | {"layers": metric_table(_FIELDS)}


def with_tables(text: str) -> str:
    """A page whose places `<!-- metrics: NAME -->` ... `<!-- end -->` are filled anew.

    Raises:
        ValueError: a place is missing.
    """
    for name, table in reference_tables().items():
        begin, end = f"<!-- metrics: {name} -->", "<!-- end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no place {begin} ... {end}; add both lines")
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the tables of the pages that are named."""
    for name in sys.argv[1:] if argv is None else argv:
        write_text(name, with_tables(Path(name).read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
