"""Run folders as trainings leave them, made in a moment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from dbsp_megatron.observability.layer_log import LayerLog
from dbsp_megatron.observability.metric_names import LAYER_FIELDS
from dbsp_megatron.observability.metrics import MetricLogger
from dbsp_megatron.observability.plot_balance import plot_rank_loads
from dbsp_megatron.observability.run_folder import RunFolder
from dbsp_megatron.observability.wandb_sink import WandbConfig

NUM_LAYERS = 5


def make_row(step: int, *, imbalance: float = 1.05) -> dict[str, Any]:
    """Metrics of one step on four ranks."""
    numbers = {
        "train/loss": 2.0 / step, "train/lr": 1e-4, "train/grad_norm": 0.5, "perf/step_s": 0.25,
        "perf/tokens_per_s": 4000.0, "perf/attention_tflops": 0.01, "mem/peak_gib": 0.5, "mem/peak_gib_max": 0.75,
        "sp/ulysses_degree": 2, "sp/ring_degree": 2, "sp/imbalance_before": 1.4, "sp/imbalance_before_max": 1.6,
        "sp/imbalance_after": imbalance, "sp/imbalance_after_max": imbalance + 0.1, "sp/imbalance_gpu": 1.02,
        "sp/plan_reuse": 1 - 1 / step, "sp/plan_regret": 0.01, "sp/replans_per_step": 0.5, "sp/mesh_changes": 0,
        "sp/density": 0.4, "sp/bytes_sent": 2_000_000, "sp/bytes_sent_max": 2_100_000, "sp/bytes_in_node": 3_000_000,
        "sp/bytes_between_nodes": 1_000_000, "sp/attention_ms": 40.0, "sp/kernel_ms": 30.0, "sp/exposed_ms": 12.0,
        "sp/exposed_ms_max": 15.0, "sp/measured_ms": 40.0, "sp/predicted_ms": math.nan if step == 1 else 38.0,
        "sp/prediction_error": math.nan if step == 1 else -0.05, "sp/slowest_rank": step % 3, "sp/slowest_excess": 0.1,
    }  # fmt: skip
    texts = {"sp/strategy": "auto", "sp/mesh": "U2R2:3 U4R1:2"}
    return numbers | texts | {"sp/rank_load": [70, 90, 80, 60], "sp/rank_kernel_ms": [30.0, 33.0, 29.0, 31.0]}


def make_layers(step: int) -> list[dict[str, Any]]:
    """Numbers of the layers in one step; two meshes."""
    plain = dict.fromkeys(LAYER_FIELDS, 1.0) | {"reused": True}
    return [
        plain | {"layer": layer, "mesh": "U4R1" if layer > 2 and step > 5 else "U2R2",
                 "imbalance_before": 1.2 + 0.1 * layer, "imbalance_after": 1.0 + 0.01 * layer + 0.1 / step}
        for layer in range(NUM_LAYERS)
    ]  # fmt: skip


def make_run(root: Path, name: str = "r", *, steps: int = 12, imbalance: float = 1.05, done: bool = True) -> Path:
    """A folder of `steps` logged steps; one that is not done lacks everything that the end of a run writes."""
    folder = RunFolder(root, name)
    folder.write_config(
        {
            "model": "dit_debug", "train": {"steps": 12}, "sp": {"strategy": "auto"}, "mask": {"method": "topp"},
            "wandb": {"mode": "disabled", "alert_imbalance": 1.5, "alert_prediction_error": 0.2},
        }
    )  # fmt: skip
    folder.write_environment(world_size=4, argv=["dbsp-train", "--name", "<b>r</b>"])
    layers = LayerLog(folder)
    with MetricLogger(folder, WandbConfig(alert_imbalance=0)) as metrics:
        for step in range(1, steps + 1):
            metrics.log(step, make_row(step, imbalance=imbalance) | ({"eval/loss": 1.0} if step % 4 == 0 else {}))
            layers.log(step, make_layers(step))
    layers.close()
    if done:
        folder.mark_done(steps)
        (folder.path / "summary.json").write_text(json.dumps({"steps": steps, "check": {"faults": []}}))
        plot_rank_loads([1.0, 2.0], folder.path / "plots" / "partition_layer_00.png")
    assert yaml.safe_load((folder.path / "config.yaml").read_text())["model"] == "dit_debug"
    return folder.path
