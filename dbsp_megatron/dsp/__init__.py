"""Dynamic sequence parallelism: tensors of several sequence dims, cut along the one that a stage does not need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbsp_megatron.dsp.explanation import explain
    from dbsp_megatron.dsp.graph import trace
    from dbsp_megatron.dsp.group import DspGroup, Traffic
    from dbsp_megatron.dsp.hooks import Parallelized, parallelize
    from dbsp_megatron.dsp.layout import Axis, Layout, Replicated, Sharded
    from dbsp_megatron.dsp.mesh import DspMesh
    from dbsp_megatron.dsp.planner import plan_stages
    from dbsp_megatron.dsp.primitives import PendingSwitch, gather, split, switch, switch_start
    from dbsp_megatron.dsp.redistribution import redistribute
    from dbsp_megatron.dsp.run import DspRun
    from dbsp_megatron.dsp.session import DspSession
    from dbsp_megatron.dsp.specs import Boundary, StageSpec, stage
    from dbsp_megatron.dsp.stages import Link, Stage, StagePlan
    from dbsp_megatron.dsp.tags import layout_of, tag
    from dbsp_megatron.dsp.unit_attention import attend_units, unit_plan_of
    from dbsp_megatron.dsp.unit_plan import UnitPlan

# Lazy, as torch.fx and fake tensors take a while to import.
_MODULES = {
    "explanation": ("explain",),
    "graph": ("trace",),
    "group": ("DspGroup", "Traffic"),
    "hooks": ("Parallelized", "parallelize"),
    "layout": ("Axis", "Layout", "Replicated", "Sharded"),
    "mesh": ("DspMesh",),
    "planner": ("plan_stages",),
    "primitives": ("PendingSwitch", "gather", "split", "switch", "switch_start"),
    "redistribution": ("redistribute",),
    "run": ("DspRun",),
    "session": ("DspSession",),
    "specs": ("Boundary", "StageSpec", "stage"),
    "stages": ("Link", "Stage", "StagePlan"),
    "tags": ("layout_of", "tag"),
    "unit_attention": ("attend_units", "unit_plan_of"),
    "unit_plan": ("UnitPlan",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Axis",
    "Boundary",
    "DspGroup",
    "DspMesh",
    "DspRun",
    "DspSession",
    "Layout",
    "Link",
    "Parallelized",
    "PendingSwitch",
    "Replicated",
    "Sharded",
    "Stage",
    "StagePlan",
    "StageSpec",
    "Traffic",
    "UnitPlan",
    "attend_units",
    "explain",
    "gather",
    "layout_of",
    "parallelize",
    "plan_stages",
    "redistribute",
    "split",
    "stage",
    "switch",
    "switch_start",
    "tag",
    "trace",
    "unit_plan_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
