"""Numbers of layers outlive kills and restarts, like those of steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from dbsp_megatron.observability.layer_log import LayerLog, layer_table, read_layers
from dbsp_megatron.observability.metric_names import LAYER_FIELDS
from dbsp_megatron.observability.run_folder import RunFolder


def _layers(value: float, layers: tuple[int, ...] = (0, 3)) -> list[dict[str, Any]]:
    plain = dict.fromkeys(LAYER_FIELDS, value) | {"mesh": "U2R2", "reused": True}
    return [plain | {"layer": layer, "imbalance_after": value + layer, "head_owner": [0, 1]} for layer in layers]


def test_log_keeps_a_list_of_each_field(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r")
    log = LayerLog(folder)
    log.log(2, _layers(1.23456789))
    log.log(3, [])
    (row,) = read_layers(folder.path)
    assert set(row) == {"step", *LAYER_FIELDS}
    assert row["layer"] == [0, 3]
    assert row["imbalance_after"] == [1.2346, 4.2346]
    assert row["reused"] == [1, 1]
    log.close()
    log.close()


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    """Trap B109: what came after the checkpoint is dropped, and a line that a kill cut short too."""
    folder = RunFolder(tmp_path, "r")
    log = LayerLog(folder)
    for step in range(1, 6):
        log.log(step, _layers(float(step)))
    log.close()
    with (folder.path / "layers.jsonl").open("a") as file:
        file.write('{"step": 6, "layer": [0')
    log = LayerLog(folder, resume_step=3)
    log.log(4, _layers(40.0))
    log.close()
    steps, layers, values = layer_table(read_layers(folder.path), "imbalance_after")
    assert (steps, layers) == ([1, 2, 3, 4], [0, 3])
    assert values.tolist() == [[1, 4], [2, 5], [3, 6], [40, 43]]


def test_table_is_nan_where_a_layer_did_not_run_or_is_unknown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r")
    log = LayerLog(folder)
    log.log(1, _layers(1.0, (0, 2)))
    log.log(2, _layers(math.nan, (1, 2)))
    log.close()
    _, layers, values = layer_table(read_layers(folder.path), "imbalance_after")
    assert layers == [0, 1, 2]
    assert np.array_equal(np.isnan(values), [[False, True, False], [True, True, True]])


def test_other_ranks_write_nothing_and_no_file_is_no_rows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r", is_main=False)
    log = LayerLog(folder)
    log.log(1, _layers(1.0))
    log.close()
    assert not list(tmp_path.iterdir())
    assert read_layers(tmp_path) == []
