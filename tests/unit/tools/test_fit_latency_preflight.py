"""The calibration tool before a training run: what is kept and refused, how long it takes, and the run's shapes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_megatron.plan.calibration import Calibration
from tests.harness import run_ranks
from tools import device_timing, fit_latency
from tools.device_timing import DESIGN, HELD_OUT, LaunchShape, Ranks, TimedLaunch, make_masks, time_collective
from tools.fit_budget import Budget
from tools.fit_config import FitOptions, parse_flags


def _run(*flags: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the tool in this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = fit_latency.main(["--device", "cpu", "--quick", *flags])
    return status, out.getvalue(), err.getvalue()


def _launches(factors: tuple[float, ...], seconds: float = 0.0) -> Any:
    """In place of `time_launches`: exact times, those of held-out masks multiplied."""

    def time_launches(
        engine: object, shape: LaunchShape, repeats: int, device: torch.device, deadline: float | None
    ) -> list[TimedLaunch]:
        time.sleep(seconds)
        launches = []
        for (name, mask), factor in zip(make_masks(shape, device).items(), (1.0,) * len(DESIGN) + factors, strict=True):
            blocks, rows = int(mask.sum()), mask.shape[1] * mask.shape[2]
            us = factor * (0.7 * blocks + 1.9 * rows + 40.0)
            launches.append(TimedLaunch(name, blocks, rows, us, 3 * us))
        return launches

    return time_launches


@contextmanager
def _made_up(factors: tuple[float, ...] = (1.0,) * len(HELD_OUT), seconds: float = 0.0) -> Iterator[mock.MagicMock]:
    launches = mock.MagicMock(side_effect=_launches(factors, seconds))
    links = [(2**n, 10.0 + n) for n in range(10, 21, 2)]
    with (
        mock.patch.object(fit_latency, "time_launches", launches),
        mock.patch.object(fit_latency, "time_collective", return_value=links),
        mock.patch.object(fit_latency, "time_planning", return_value=123.0),
    ):
        yield launches


def test_a_file_for_the_same_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "machine.json"
    with _made_up() as launches:
        assert _run("--output", str(output))[0] == 0
        before = output.read_bytes()
        status, out, err = _run("--output", str(output))
        assert (status, err, launches.call_count) == (0, "", 1)
        assert (
            out == f"kept {output}: it was measured on this machine, with these versions and shapes (--fresh: again)\n"
        )
        assert output.read_bytes() == before
        status, out, _ = _run("--output", str(output), "--fresh")
        assert (status, launches.call_count) == (0, 2)
        assert "kept" not in out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": "another, 1 node(s) of 1 rank(s)"}, "it was measured on another"),
        ({"torch": "1.0"}, "it was measured with torch 1.0, this is"),
        ({"dbsp_megatron": None}, "it was measured with dbsp_megatron missing"),
        ({"kernels": ()}, "it has no forward rate of torch float32 D16 8x8"),
        ({"note": "tools/fit_latency.py: at most 4 heads"}, "other sizes were measured"),
        (None, "it cannot be used"),
    ],
)
def test_a_file_for_something_else_is_measured_again(
    changes: dict[str, Any] | None, reason: str, tmp_path: Path
) -> None:
    output = tmp_path / "machine.json"
    with _made_up() as launches:
        assert _run("--output", str(output))[0] == 0
        made = Calibration.load(output)
        if changes is None:
            output.write_text("{")
        else:
            versions = {k: v for k, v in {**made.versions, **changes}.items() if k in made.versions and v is not None}
            others = {key: value for key, value in changes.items() if key not in made.versions}
            replace(made, versions=versions, **others).save(output)
        status, out, err = _run("--output", str(output))
        assert (status, launches.call_count) == (0, 2), err
        assert f"{output} is not kept: {reason}" in out
    assert Calibration.load(output) == made


def test_other_shapes_are_measured_again(tmp_path: Path) -> None:
    output = tmp_path / "machine.json"
    with _made_up() as launches:
        assert _run("--output", str(output))[0] == 0
        assert "it has no forward rate of torch float32 D32 8x8" in _run("--output", str(output), "--head-dim", "32")[1]
        assert launches.call_count == 2


def _run_on_two(rank: int, world_size: int, outputs: list[str]) -> tuple[tuple[int, str, str], int]:
    with _made_up() as launches:
        return _run("--output", outputs[rank]), launches.call_count


def test_the_first_rank_decides_what_is_kept(tmp_path: Path) -> None:
    """Ranks of other nodes may see another file, or none."""
    outputs = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    first = run_ranks(_run_on_two, 2, outputs)
    assert [(found[0][0], found[1]) for found in first] == [(0, 1), (0, 1)], first
    again = run_ranks(_run_on_two, 2, outputs)
    assert [(found[0][0], found[1]) for found in again] == [(0, 0), (0, 0)], again
    assert again[0][0][1].startswith("kept")
    assert again[1][0][1] == ""
    links = {(link.collective, link.num_ranks, link.scope) for link in Calibration.load(outputs[0]).links}
    assert links == {(collective, 2, "node") for collective in fit_latency.COLLECTIVES}
    assert not Path(outputs[1]).exists()


def test_a_poor_fit_is_refused_unless_accepted(tmp_path: Path) -> None:
    output = tmp_path / "machine.json"
    with _made_up(factors=(0.6, 0.6, 0.6, 1.0)):
        status, out, err = _run("--output", str(output))
        assert (status, out) == (1, "")
        assert "off by 67% (median)" in err
        assert "pass --accept" in err
        assert len(err.splitlines()) == 1
        assert not output.exists()
        status, out, err = _run("--output", str(output), "--accept")
        assert status == 0
        assert "WARNING: the torch float32 D16 8x8 forward rate is off by up to 67%" in err
    assert "67% (worst 67%)" in Calibration.load(output).note


def test_time_that_is_over_ends_it_and_writes_nothing(tmp_path: Path) -> None:
    flags = ["--output", str(tmp_path / "machine.json"), "--max-seconds", "1", "--head-dim", "16", "32"]
    with _made_up(seconds=1.2) as launches:
        status, out, err = _run(*flags)
    assert (status, out, launches.call_count) == (1, "", 1)
    assert "--max-seconds=1 is over before torch float32 D32 8x8 was measured: nothing is written" in err
    assert not list(tmp_path.iterdir())


def test_no_time_is_left_to_try_again(tmp_path: Path) -> None:
    with _made_up(factors=(0.4,) * len(HELD_OUT), seconds=1.2) as launches:
        status, _, err = _run("--output", str(tmp_path / "machine.json"), "--max-seconds", "1")
    assert (status, launches.call_count) == (1, 1)
    assert "--max-seconds=1 left no time to try again" in err


def test_measurements_get_deadlines_in_their_share(tmp_path: Path) -> None:
    with _made_up() as launches:
        started = time.monotonic()
        _run("--output", str(tmp_path / "machine.json"), "--max-seconds", "100", "--head-dim", "16", "32")
    first, second = (call.args[4] - started for call in launches.call_args_list)
    assert first == pytest.approx(50, abs=5)
    assert second == pytest.approx(100, abs=5)
    with _made_up() as launches:
        _run("--output", str(tmp_path / "machine.json"), "--fresh")
    assert launches.call_args.args[4] is None


def _late_collective(rank: int, world_size: int) -> int:
    ranks, calls = Ranks("cpu"), 0
    real = device_timing.Stopwatch.microseconds

    def count(*args: Any, **options: Any) -> float:
        nonlocal calls
        calls += 1
        return real(*args, **options)

    if ranks.group is None:
        raise RuntimeError("there is no group")
    # Late on one rank only: all stop together, or the others would wait.
    deadline = time.monotonic() + (1000 if rank else -1)
    with mock.patch.object(device_timing.Stopwatch, "microseconds", count):
        time_collective("p2p", [1024, 4096], ranks.group, ranks, 50, deadline)
    return calls


def test_time_collective_stops_on_all_ranks_together() -> None:
    # Two rounds of warm-up and two of timings, of two sizes.
    assert run_ranks(_late_collective, 2) == [8, 8]


def test_budget_passes_on_what_was_saved() -> None:
    budget = Budget(100.0, Ranks("cpu"), 4.0)
    now = time.monotonic()
    first, second = budget.take(3.0), budget.take(1.0)
    assert first is not None
    assert second is not None
    assert first - now == pytest.approx(75, abs=1)
    assert second - now == pytest.approx(100, abs=1)
    assert not budget.is_past(first)
    assert budget.is_past(now - 1)
    assert Budget(None, Ranks("cpu"), 1.0).take(1.0) is None


def test_words_after_two_hyphens_say_what_the_run_computes_with(tmp_path: Path) -> None:
    words = ["--quick", "--output", "x.json", "--", "--config", "launch/demo.yaml", "--train.device", "cpu"]
    config, options = parse_flags(words)
    assert (config.device, config.engines, config.dtypes) == ("cpu", ("auto",), ("float32",))
    assert (config.head_dims, config.blocks) == ((16,), ((16, 16),))
    # Never more than launches usually have, never fewer than can be measured.
    assert (config.heads, config.seqlen) == (4, 256)
    assert options == FitOptions(output=Path("x.json"))
    config, _ = parse_flags([*words, "--sp.block_size", "64", "--train.precision", "bf16", "--sp.engine", "torch"])
    assert (config.dtypes, config.blocks, config.seqlen) == (("bfloat16",), ((64, 64),), 1024)
    assert config.engines == ("torch",)
    config, _ = parse_flags(["--block", "8", "--seqlen", "400", *words])
    assert (config.blocks, config.seqlen) == (((8, 8),), 400)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-seconds", "0.5"], "--max-seconds must be at least 1, got 0.5"),
        (["--max-seconds", "nan"], "--max-seconds must be at least 1, got nan"),
        (["--", "--model", "nothing_such"], "model config must be"),
        (["--", "--sp.block_size", "0"], "sp.block_size must be >= 1, got 0"),
    ],
)
def test_main_refuses_flags(flags: list[str], message: str, tmp_path: Path) -> None:
    status, out, err = _run("--output", str(tmp_path / "machine.json"), *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())


def test_ranks_must_know_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else links between nodes would count as links inside one."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE must say how many of the 4 ranks share a node"):
        Ranks("cpu")
