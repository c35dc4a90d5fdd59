"""What a training run leaves behind: numbers of layers, pictures, closing table, report, verdict of `train.check`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.observability import RunFolder, closing_table, get_logger, read_metrics
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.layer_log import LayerLog, layer_table, read_layers
from dbsp_megatron.plan import PartitionPlan, Workload, block_homes, plan_loads, plan_partition
from dbsp_megatron.strategy import SequenceParallel
from dbsp_megatron.train.distributed import World

CHECK_FAILED_CODE = 3
_NUM_PICTURED_LAYERS = 3

logger = get_logger(__name__)


class RunReport:
    """Collects per-layer numbers while the run goes on and writes everything at its end; a context manager.

    Args:
        folder: the run folder.
        world: all ranks.
        sp: what the numbers are of.
        resume_step: step of the checkpoint the run continues from; later lines of layers.jsonl are dropped.
    """

    def __init__(
        self, folder: RunFolder, world: World, sp: SequenceParallel, *, resume_step: int | None = None
    ) -> None:
        self._folder, self._world, self._sp = folder, world, sp
        self._layers = LayerLog(folder, resume_step=resume_step)

    def __enter__(self) -> RunReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._layers.close()

    def add_layers(self, step: int) -> None:
        """Keep this step's numbers of each layer."""
        if self._world.is_main:
            self._layers.log(step, self._sp.layer_stats())

    def pictures(self, step: int, config: TrainConfig) -> dict[str, Path]:
        """Draw balance and masks as they are now; PNG files by key, on the main rank. Collective: masks are gathered.

        A picture that cannot be drawn is a warning.
        """
        masks = self._masks()
        images: dict[str, Path] = {}
        if not self._world.is_main:
            return images
        from dbsp_megatron.observability.plot_balance import plot_layer_imbalance, plot_rank_loads
        from dbsp_megatron.observability.plots import plot_mask_partition

        here = self._folder.path / "images" / f"step_{step:08d}"
        try:
            if rows := read_layers(self._folder.path):
                steps, layers, before = layer_table(rows, "imbalance_before")
                plot_layer_imbalance(
                    steps, layers, before, layer_table(rows, "imbalance_after")[2], here / "layers.png"
                )
                images["images/layer_imbalance"] = here / "layers.png"
            if loads := self._sp.stats(by_rank=True)["sp/rank_load"]:
                plot_rank_loads(loads, here / "loads.png")
                images["images/rank_load"] = here / "loads.png"
            for layer, (blocks, plan) in masks.items():
                path = here / f"partition_layer_{layer:02d}.png"
                arrays = partition_arrays(blocks, plan, config.sp.block_size)
                plot_mask_partition(**arrays, path=path, title=f"Layer {layer}, step {step}, first sample")
                images[f"images/partition_layer_{layer:02d}"] = path
        except (OSError, ValueError) as error:
            logger.warning("pictures of step %d: %s", step, error)
        return images

    def finish(self, config: TrainConfig) -> int:
        """Write and print the report; returns the exit code. Collective: masks are gathered."""
        masks = self._masks() if config.run.plots else {}
        self._layers.close()
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
        # Where models cut their tensors by themselves, no blocks of a layer are planned.
        balanced = self._sp.size > 1 and self._sp.strategy.splits_tokens
        faults = check_faults(summary, balanced=balanced) if config.train.check else []
        summary["check"] = {"asked": config.train.check, "faults": faults}
        write_text(self._folder.path / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
        # Before the pictures, which may take longer than the others can wait in a collective.
        code = int(self._world.broadcast(CHECK_FAILED_CODE if faults else 0))
        print(closing_table(rows, self._sp.layer_stats(), self._sp.stats()), flush=True)
        if config.run.plots:
            self._draw(rows, masks, config)
        if config.run.report:
            self._write_page()
        for fault in faults:
            logger.error("train.check failed: %s", fault)
        return code

    def _masks(self) -> dict[int, tuple[np.ndarray, PartitionPlan]]:
        """Masks and plans of some layers, of those whose mask every rank kept; collective."""
        kept = set.intersection(*map(set, self._world.gather(self._sp.layers_with_mask)))
        layers = sorted(kept)
        pictured = [layers[index] for index in _spread(len(layers), _NUM_PICTURED_LAYERS)]
        return {layer: self._sp.layer_mask(layer) for layer in pictured}

    def _draw(
        self,
        rows: Sequence[Mapping[str, Any]],
        masks: Mapping[int, tuple[np.ndarray, PartitionPlan]],
        config: TrainConfig,
    ) -> None:
        from dbsp_megatron.observability.plots import plot_imbalance, plot_loss, plot_mask_partition

        plots = self._folder.path / "plots"
        plot_loss(rows, plots / "loss.png")
        layers = read_layers(self._folder.path)
        if layers:
            steps, _, before = layer_table(layers, "imbalance_before")
            after = layer_table(layers, "imbalance_after")[2]
            self._folder.save_arrays("imbalance", steps=np.array(steps), before=before, after=after)
            plot_imbalance(before, after, plots / "imbalance.png", steps=steps)
        size = config.sp.block_size
        for layer, (blocks, plan) in masks.items():
            arrays = partition_arrays(blocks, plan, size)
            self._folder.save_arrays(f"partitions/layer_{layer:02d}", **arrays)
            title = f"Layer {layer}, step {rows[-1]['step']}, first sample"
            plot_mask_partition(**arrays, path=plots / f"partition_layer_{layer:02d}.png", title=title)

    def _write_page(self) -> None:
        """A page that cannot be written is a warning: the run itself is over and good."""
        from dbsp_megatron.observability.html_report import write_report

        try:
            write_report([self._folder.path], self._folder.path / "report.html")
        except (OSError, ValueError) as error:
            logger.warning("report.html was not written (%s); try tools/report.py %s", error, self._folder.path)


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
