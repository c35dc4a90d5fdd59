"""What a run logs: registered keys only, alike in every writer, each step once over restarts."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbsp_megatron.observability import read_metrics
from dbsp_megatron.observability.layer_log import read_layers
from dbsp_megatron.observability.metric_names import LAYER_FIELDS, METRICS, charted
from dbsp_megatron.observability.wandb_sink import WandbConfig
from tests.harness import run_ranks
from tests.integration.training import make_config, make_trainer, with_run


def _train(rank: int, world_size: int, root: str, steps: int, mode: str) -> int:
    os.environ.pop("WANDB_MODE", None)
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    config = make_config(
        Path(root), ulysses=world_size, steps=steps, eval_every=3, eval_samples=1, checkpoint_every=2, log_every=1
    )
    config = with_run(config, tensorboard=True)
    wandb = WandbConfig(mode=mode, image_every=2)  # type: ignore[arg-type]
    return make_trainer(dataclasses.replace(config, wandb=wandb)).run()


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: after a header of 7 bytes blocks of 32 KiB, with pieces of (crc, size, kind, bytes)."""
    at, pieces = 7, []
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        pieces.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        # 1 is a whole record, 4 the last piece of one.
        if kind in (1, 4):
            yield b"".join(pieces)
            pieces.clear()


def _wandb_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """History of all offline parts of a run, by step; a later part replaces what the one before said of a step."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    rows: dict[int, dict[str, Any]] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(file.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.setdefault(int(record.history.step.num), {}).update(items)
    return rows


def test_all_writers_hold_the_same_keys_at_the_same_steps(tmp_path: Path) -> None:
    """Trap B109 too: the run is stopped after a checkpoint and goes on, and no step is there twice."""
    pytest.importorskip("wandb")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in (2, 4):
        assert run_ranks(_train, 2, str(tmp_path), steps, "offline", timeout_s=280) == [0, 0]
    folder = tmp_path / "run"
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    logged = {key for row in rows for key in row} - {"step", "nonfinite"}
    # All keys of the reference, and no other.
    assert logged == set(METRICS)
    for row in rows:
        for key in set(row) - {"step", "nonfinite"}:
            kinds = {"text": str, "list": list, "number": (int, float, type(None))}
            assert isinstance(row[key], kinds[METRICS[key].kind]), key

    events = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    texts = {
        tag.removesuffix("/text_summary"): {event.step for event in events.Tensors(tag)}
        for tag in events.Tags()["tensors"]
    }
    sent = _wandb_rows(folder)
    assert sorted(sent) == [1, 2, 3, 4]
    for row in rows:
        step = row["step"]
        expected = {key: value for key, value in charted(row).items() if key.partition("/")[0] in
                    ("train", "eval", "perf", "mem", "sp")}  # fmt: skip
        in_wandb = {key for key in sent[step] if not key.startswith(("_", "images/"))}
        in_tensorboard = {tag for tag, values in scalars.items() if step in values}
        in_tensorboard |= {tag for tag, steps in texts.items() if step in steps}
        assert in_wandb == in_tensorboard == set(expected)
        for key, value in expected.items():
            if isinstance(value, str) or value is None:
                continue
            assert sent[step][key] == pytest.approx(value)
            assert scalars[key][step] == pytest.approx(value, rel=1e-5, abs=1e-12)
    assert {step for step, row in sent.items() if any("layer_imbalance" in key for key in row)} == {2, 4}
    assert math.isnan(scalars["sp/predicted_ms"][1])


def test_layers_and_report_of_a_run_in_two_parts(tmp_path: Path) -> None:
    for steps in (2, 4):
        assert run_ranks(_train, 2, str(tmp_path), steps, "disabled", timeout_s=280) == [0, 0]
    folder = tmp_path / "run"
    layers = read_layers(folder)
    assert [row["step"] for row in layers] == [1, 2, 3, 4]
    assert all(set(row) == {"step", *LAYER_FIELDS} for row in layers)
    for row, line in zip(read_metrics(folder), layers, strict=True):
        assert max(line["imbalance_after"]) == pytest.approx(row["sp/imbalance_after_max"], rel=1e-4)
        assert row["sp/rank_kernel_ms"][row["sp/slowest_rank"]] == max(row["sp/rank_kernel_ms"])
        assert row["mem/peak_gib_max"] >= row["mem/peak_gib"]
    assert "finished" in (folder / "report.html").read_text()
    # W&B is off, so that nobody would look at pictures on the way.
    assert not (folder / "images").exists()
