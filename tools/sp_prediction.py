"""The time that the latency model of a run predicts for an attention call that it has made."""

from __future__ import annotations

import torch

from dbsp_megatron import SequenceParallel
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.row_tails import RowTails
from dbsp_megatron.strategy.pipelining import asked_chunks, choose_num_chunks, latency_model
from dbsp_megatron.strategy.records import LayerRecord
from dbsp_megatron.strategy.statistics import layer_workloads


def predicted_ms(sp: SequenceParallel, layer: int, device: torch.device, *, backward: bool) -> float | None:
    """Predicted milliseconds of the last call of a layer: its plan, in the chunks of heads that a run would take.

    The rates are those of `sp.calibration`, corrected by nothing that was measured here. There is no prediction where
    they have no rate of the data type, or no curve of the links.

    Args:
        sp: has made the call in the current step, with one mask for the whole batch.
        layer: of that call.
        device: of that call.
        backward: the backward pass as well.
    """
    record = sp.records.layers.get(layer)
    if record is None or record.plan is None or record.shape is None:
        return None
    plan, shape, calibration = record.plan, record.shape, sp.strategy.calibration
    num_chunks = 1 if plan.ulysses_degree == 1 else asked_chunks(sp.config, device)
    if num_chunks == "auto":
        num_chunks = choose_num_chunks(plan, shape, calibration, sp.strategy.ranks_per_node)
    try:
        model = latency_model(shape, calibration, sp.strategy.ranks_per_node, num_chunks=num_chunks)
        if not any(rate.dtype == model.dtype for rate in calibration.kernels):
            return None
        forward = model.predict(plan, tails=_tails(sp, record))
        passes = [forward]
        if backward:
            passes.append(model.predict(plan, backward=True, num_chunks=forward.num_chunks))
    except ValueError:
        return None
    return sum(found.total_us for found in passes) / 1e3


def _tails(sp: SequenceParallel, record: LayerRecord) -> IntArray | None:
    """What the fullest multiprocessor computes; None where it is not known how many there are."""
    num_multiprocessors = sp.strategy.calibration.num_multiprocessors
    workloads = [found for layer, _, found in layer_workloads(sp.records, sp.latest) if layer == record.layer]
    if num_multiprocessors is None or record.plan is None or not workloads:
        return None
    plan = record.plan
    batch_size = 1 if record.shape is None else record.shape.batch
    tails = RowTails(workloads[-1], plan.ulysses_degree, plan.ring_degree, batch_size=batch_size)
    return tails.bound(plan, num_multiprocessors)
