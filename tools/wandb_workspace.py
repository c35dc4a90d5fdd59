"""Save a W&B workspace whose charts put side by side what belongs together: balance, plans, traffic, stragglers.

Usage: python tools/wandb_workspace.py --project dbsp_megatron [--entity TEAM] [--name NAME]
       python tools/wandb_workspace.py --show
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

LAYOUT: Mapping[str, Mapping[str, Sequence[str]]] = {
    "Balance": {
        "Imbalance, mean of layers": ("sp/imbalance_before", "sp/imbalance_after"),
        "Imbalance, worst layer": ("sp/imbalance_before_max", "sp/imbalance_after_max"),
        "Slowest rank over the mean": ("sp/slowest_excess",),
        "Slowest rank": ("sp/slowest_rank",),
    },
    "Plans": {
        "Plan reuse": ("sp/plan_reuse",),
        "Regret": ("sp/plan_regret",),
        "Fresh plans per step": ("sp/replans_per_step",),
        "Degrees of most layers": ("sp/ulysses_degree", "sp/ring_degree"),
    },
    "Attention time": {
        "Predicted and measured (ms)": ("sp/predicted_ms", "sp/measured_ms"),
        "Prediction error": ("sp/prediction_error",),
        "Kernels and what they do not hide (ms)": ("sp/kernel_ms", "sp/exposed_ms", "sp/exposed_ms_max"),
        "Speed of kernels (TFLOP/s)": ("perf/attention_tflops",),
    },
    "Traffic": {
        "Planned bytes by kind of link": ("sp/bytes_in_node", "sp/bytes_between_nodes"),
        "Bytes sent": ("sp/bytes_sent", "sp/bytes_sent_max"),
    },
    "Training": {
        "Loss": ("train/loss", "eval/loss"),
        "Gradient norm": ("train/grad_norm",),
        "Step time (s)": ("perf/step_s",),
        "Waiting for data (ms)": ("perf/data_ms", "perf/data_ms_max"),
        "Tokens per second": ("perf/tokens_per_s",),
        "Peak memory (GiB)": ("mem/peak_gib", "mem/peak_gib_max"),
    },
}
"""Sections, their charts, and the keys of each chart."""

PICTURES = ("images/layer_imbalance", "images/rank_load")


def build(entity: str, project: str, name: str) -> Any:
    """A workspace, not saved yet.

    Raises:
        ValueError: wandb-workspaces is not installed.
    """
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError(
            "saving a workspace needs the package wandb-workspaces, which is not installed; run "
            "`pip install wandb-workspaces`, or print the layout with --show"
        )
    workspaces: Any = importlib.import_module("wandb_workspaces.workspaces")
    panels: Any = importlib.import_module("wandb_workspaces.reports.v2")
    sections = [
        workspaces.Section(
            name=section,
            panels=[panels.LinePlot(title=title, x="Step", y=list(keys)) for title, keys in charts.items()],
            is_open=True,
        )
        for section, charts in LAYOUT.items()
    ]
    pictures = [panels.MediaBrowser(media_keys=[key]) for key in PICTURES]
    sections.append(workspaces.Section(name="Pictures", panels=pictures, is_open=True))
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Save a W&B workspace for runs of dbsp_megatron.")
    parser.add_argument("--project", default="dbsp_megatron", help="W&B project (default: dbsp_megatron)")
    parser.add_argument("--entity", default="", help="W&B user or team (default: the account's own)")
    parser.add_argument("--name", default="dbsp_megatron: balance", help="name of the workspace")
    parser.add_argument("--show", action="store_true", help="print the layout and save nothing")
    options = parser.parse_args(argv)
    if options.show:
        print(json.dumps({section: dict(charts) for section, charts in LAYOUT.items()}, indent=2))
        return 0
    try:
        workspace = build(options.entity, options.project, options.name)
    except ValueError as error:
        print(f"wandb_workspace: {error}", file=sys.stderr)
        return 2
    workspace.save()
    print(workspace.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
