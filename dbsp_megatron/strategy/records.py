"""What was measured of each layer's attention in the current step."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dbsp_megatron.plan import PartitionPlan
from dbsp_megatron.strategy.call import CallShape, LayerCall


def mesh_name(mesh: tuple[int, int]) -> str:
    """Such as U4R2."""
    return f"U{mesh[0]}R{mesh[1]}"


class Stopwatch:
    """Elapsed milliseconds of work on a device; on CUDA by events, so that starting and stopping never waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        if self._cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            # Asked for once, as each answer takes the host as long as an event does.
            self._stream = torch.cuda.current_stream()
        self._elapsed = 0.0
        self.restart()

    def restart(self) -> None:
        """The work begins only now."""
        if self._cuda:
            self._events[0].record(self._stream)
        else:
            self._start = time.perf_counter()

    def stop(self) -> Stopwatch:
        """End of the work."""
        if self._cuda:
            self._events[1].record(self._stream)
        else:
            self._elapsed = time.perf_counter() - self._start
        return self

    def elapsed_ms(self) -> float:
        """Milliseconds between start and stop; waits for the device."""
        if self._cuda:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1]))
        return self._elapsed * 1e3


@dataclass
class LayerRecord:
    """One layer in one step: calls (micro-batches, recompute) add up in time and bytes, the last gives the rest."""

    layer: int
    imbalance_before: float = 1.0
    imbalance_after: float = 1.0
    imbalance_gpu: float = 1.0
    reused: bool = False
    density: float = 0.0
    moved_q_fraction: float = 0.0
    barrier_blocks: int = 0
    bytes_sent: int = 0
    head_owner: list[int] = field(default_factory=list)
    watches: list[Stopwatch] = field(default_factory=list)
    blocks_timed: int = 0
    mesh: tuple[int, int] = (1, 1)
    predicted_us: float = 0.0
    """Forward time of the calls so far as a latency model has it; nan without one."""
    forward_kernels: list[Stopwatch] = field(default_factory=list)
    """Calls of the attention engine in forward passes, recompute included."""
    backward_kernels: list[Stopwatch] = field(default_factory=list)
    """The same in backward passes."""
    backward_calls: float = 0.0
    """How many those are; calls of parts of the heads count as parts of one."""
    plan: PartitionPlan | None = None
    """Of the last call."""
    shape: CallShape | None = None
    """Of the last call."""
    plan_key: tuple[object, ...] = ()
    """Of the last call; with the layer it names the counts that are kept of its mask."""
    samples_per_mask: float = 1.0
    """Batch entries that share one counted mask."""

    def ran(self, call: LayerCall, plan: PartitionPlan) -> None:
        """Keep what a call was; numbers are made of it when somebody wants them."""
        self.plan, self.shape, self.plan_key = plan, call.shape, call.plan_key
        self.samples_per_mask = call.q.shape[0] / max(1, call.mask_batch_size)

    @property
    def attention_ms(self) -> float:
        """Forward time of the calls so far on this rank."""
        return sum(watch.elapsed_ms() for watch in self.watches)

    @property
    def kernel_ms(self) -> float:
        """Time of the attention engine in the calls so far on this rank, forward and backward."""
        return sum(watch.elapsed_ms() for watch in (*self.forward_kernels, *self.backward_kernels))

    @property
    def exposed_ms(self) -> float:
        """Forward time of the calls so far in which the attention engine did not run on this rank."""
        return max(0.0, self.attention_ms - sum(watch.elapsed_ms() for watch in self.forward_kernels))

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for logs."""
        return {
            "layer": self.layer,
            "mesh": mesh_name(self.mesh),
            "imbalance_before": self.imbalance_before,
            "imbalance_after": self.imbalance_after,
            "imbalance_gpu": self.imbalance_gpu,
            "reused": self.reused,
            "density": self.density,
            "moved_q_fraction": self.moved_q_fraction,
            "bytes_sent": self.bytes_sent,
            "attention_ms": self.attention_ms,
            "kernel_ms": self.kernel_ms,
            "exposed_ms": self.exposed_ms,
            "predicted_ms": self.predicted_us / 1e3,
            "head_owner": self.head_owner,
        }


class StepRecords:
    """The layers of the current step, and the rate that predicts the next one."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerRecord] = {}
        self._before: dict[int, LayerRecord] = {}

    def start(self) -> None:
        """A new step begins. Its times are asked for when somebody wants them: they may not be known yet."""
        if any(record.blocks_timed for record in self.layers.values()):
            self._before = self.layers
        self.layers = {}

    def layer(self, layer: int) -> LayerRecord:
        """The record of a layer, made when first asked for."""
        record = self.layers.get(layer)
        if record is None:
            record = self.layers[layer] = LayerRecord(layer)
        return record

    def measured_ms(self) -> float:
        """Attention time of this rank in this step."""
        return sum(record.attention_ms for record in self.layers.values())

    def predicted_ms(self) -> float:
        """What a latency model says of this step.

        Without one, the time of its barrier-counted blocks at the rate of the step before; nan in the first step.
        """
        modelled = sum(record.predicted_us for record in self.layers.values())
        if self.layers and math.isfinite(modelled):
            return modelled / 1e3
        if not self._before:
            return float("nan")
        blocks = sum(record.blocks_timed for record in self._before.values())
        rate = sum(record.attention_ms for record in self._before.values()) / blocks
        return rate * sum(record.blocks_timed for record in self.layers.values())

    def total(self, name: str) -> float:
        """Sum of a field over the layers."""
        return float(sum(getattr(record, name) for record in self.layers.values()))

    def meshes(self) -> Counter[tuple[int, int]]:
        """Layers by the mesh of their last call."""
        return Counter(record.mesh for record in self.layers.values())

    def mean(self, name: str) -> float:
        """Mean of a field over the layers; nan before the first layer."""
        values = [float(getattr(record, name)) for record in self.layers.values()]
        return float(np.mean(values)) if values else float("nan")

    def largest(self, name: str) -> float:
        """Largest value of a field over the layers; nan before the first layer."""
        return max((float(getattr(record, name)) for record in self.layers.values()), default=float("nan"))
