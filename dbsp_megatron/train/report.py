"""What a finished training run leaves behind: closing table, pictures, summary.json, the verdict of `train.check`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.observability import RunFolder, closing_table, get_logger, read_metrics
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.plan import PartitionPlan, Workload, block_homes, plan_loads, plan_partition
from dbsp_megatron.strategy import SequenceParallel
from dbsp_megatron.train.distributed import World

CHECK_FAILED_CODE = 3
_NUM_PICTURED_LAYERS = 3

logger = get_logger(__name__)


class RunReport:
    """Collects per-layer numbers while the run goes on and writes everything at its end."""

    def __init__(self, folder: RunFolder, world: World, sp: SequenceParallel) -> None:
        self._folder, self._world, self._sp = folder, world, sp
        self._steps: list[int] = []
        self._before: list[list[float]] = []
        self._after: list[list[float]] = []

    def add_layers(self, step: int) -> None:
        """Keep this step's imbalance of each layer."""
        layers = self._sp.layer_stats()
        self._steps.append(step)
        self._before.append([float(layer["imbalance_before"]) for layer in layers])
        self._after.append([float(layer["imbalance_after"]) for layer in layers])

    def finish(self, config: TrainConfig) -> int:
        """Write and print the report; returns the exit code. Collective: masks are gathered."""
        layers = self._sp.layer_stats()
        pictured = _spread(len(layers), _NUM_PICTURED_LAYERS) if config.run.plots else []
        masks = {layer: self._sp.layer_mask(layer) for layer in (layers[index]["layer"] for index in pictured)}
        if not self._world.is_main:
            return int(self._world.broadcast(None))
        rows = read_metrics(self._folder.path)
        summary = summarise(rows)
        summary |= {
            "world_size": self._world.size,
            "strategy": config.sp.strategy,
            "ulysses_degree": self._sp.ulysses_degree,
            "ring_degree": self._sp.ring_degree,
        }
        faults = check_faults(summary, balanced=self._sp.size > 1) if config.train.check else []
        summary["check"] = {"asked": config.train.check, "faults": faults}
        write_text(self._folder.path / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
        # Before the pictures, which may take longer than the others can wait in a collective.
        code = int(self._world.broadcast(CHECK_FAILED_CODE if faults else 0))
        print(closing_table(rows, layers, self._sp.stats()), flush=True)
        if config.run.plots:
            self._draw(rows, masks, config)
        for fault in faults:
            logger.error("train.check failed: %s", fault)
        return code

    def _draw(
        self,
        rows: Sequence[Mapping[str, Any]],
        masks: Mapping[int, tuple[np.ndarray, PartitionPlan]],
        config: TrainConfig,
    ) -> None:
        from dbsp_megatron.observability.plots import plot_imbalance, plot_loss, plot_mask_partition

        plots = self._folder.path / "plots"
        plot_loss(rows, plots / "loss.png")
        if not masks:
            return
        before, after = np.array(self._before), np.array(self._after)
        self._folder.save_arrays("imbalance", steps=np.array(self._steps), before=before, after=after)
        plot_imbalance(before, after, plots / "imbalance.png", steps=self._steps)
        size = config.sp.block_size
        for layer, (blocks, plan) in masks.items():
            arrays = partition_arrays(blocks, plan, size)
            self._folder.save_arrays(f"partitions/layer_{layer:02d}", **arrays)
            title = f"Layer {layer}, step {self._steps[-1]}, first sample"
            plot_mask_partition(**arrays, path=plots / f"partition_layer_{layer:02d}.png", title=title)


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of a run from its metrics; ends are means over the first and last tenth of the logged steps."""
    losses = _series(rows, "train/loss")
    tenth = max(1, len(losses) // 10)
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "first_loss": _mean(losses[:tenth]),
        "last_loss": _mean(losses[-tenth:]),
        "imbalance_before": _mean(_series(rows, "sp/imbalance_before")),
        "imbalance_after": _mean(_series(rows, "sp/imbalance_after")),
        "imbalance_gpu": _mean(_series(rows, "sp/imbalance_gpu")),
        "plan_reuse": _mean(_series(rows, "sp/plan_reuse")[-1:]),
        "density": _mean(_series(rows, "sp/density")),
        "bytes_sent_per_step": _mean(_series(rows, "sp/bytes_sent")),
        "attention_ms_per_step": _mean(_series(rows, "sp/attention_ms")),
        "steps_per_s": _inverse(_mean(_series(rows, "perf/step_s"))),
    }


def check_faults(summary: Mapping[str, Any], *, balanced: bool) -> list[str]:
    """What keeps a run from having improved, in words.

    Args:
        summary: result of `summarise`.
        balanced: whether several ranks shared the work, so that imbalance means something.
    """
    faults = []
    first, last = summary["first_loss"], summary["last_loss"]
    if first is None or last is None or not last < first:
        faults.append(f"the mean loss of the last tenth of the steps ({last}) is not below that of the first ({first})")
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    if balanced and (before is None or after is None or not after < before):
        faults.append(f"the mean imbalance with plans ({after}) is not below that without ({before})")
    return faults


def partition_arrays(blocks: np.ndarray, plan: PartitionPlan, block_size: int) -> dict[str, np.ndarray]:
    """Arguments of `plot_mask_partition` for one layer: its plan beside the contiguous baseline.

    Args:
        blocks: bool [H, Nq, Nk].
        plan: the layer's plan.
        block_size: tokens per block.
    """
    import torch

    ulysses, ring = plan.ulysses_degree, plan.ring_degree
    mask = BlockMask(torch.from_numpy(blocks)[None], block_size, block_size)
    baseline = plan_partition(mask, ulysses, ring, head_policy="contiguous", block_policy="contiguous")
    # The plan's own loads are those of the counts it was made from: other samples, maybe an older step.
    workload = Workload.from_mask(mask, plan.q_block_home, plan.kv_block_home, ulysses * ring)
    loads = plan_loads(plan, workload)
    return {
        "mask": blocks,
        "head_owner": plan.main_head_owner,
        "q_home_before": block_homes(blocks.shape[1], ulysses, ring, "contiguous"),
        "q_home_after": plan.q_block_home,
        "ring_owner": plan.q_block_owner,
        "loads_before": baseline.loads.sum(axis=2),
        "loads_after": loads.sum(axis=2),
        "head_owner_before": baseline.main_head_owner,
    }


def _spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` indices spread over range(count), ends included."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(index * (count - 1) / (wanted - 1)) for index in range(wanted)})


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if isinstance(row.get(key), (int, float))]


def _mean(values: Sequence[float]) -> float | None:
    """Mean; None, as JSON has no NaN, if there is nothing finite to average."""
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _inverse(value: float | None) -> float | None:
    return 1 / value if value else None
