"""W&B is optional: one run per name, on one rank, and never a reason to stop or to wait."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from dbsp_megatron.observability.metrics import MetricLogger
from dbsp_megatron.observability.run_folder import RunFolder
from dbsp_megatron.observability.wandb_sink import WandbConfig, WandbSink, run_id

ONLINE = WandbConfig(mode="online", entity="team", group="g", tags=["a"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "on"}, "wandb.mode must be disabled, offline or online, got 'on'"),
        ({"project": ""}, "wandb.project must not be empty"),
        ({"tags": "ab"}, "wandb.tags must be a list"),
        ({"tags": [1]}, "wandb.tags must be a list"),
    ],
)
def test_config_refuses_wrong_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WandbConfig(**fields)


def test_disabled_does_not_import_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = WandbSink(WandbConfig(), tmp_path, is_main=True)
    sink.log(1, {"a": 1})
    sink.finish()
    assert not sink.active
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_main", [True, False])
def test_missing_package_is_named_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ValueError, match="pip install wandb"):
        WandbSink(WandbConfig(mode="offline"), tmp_path, is_main=is_main)


def test_init_passes_the_run_and_masks_secrets(
    tmp_path: Path, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap B107: works without RANK set; wandb's files land in the run folder."""
    argv = ["train", "--hub-token", "abc"]
    monkeypatch.setattr(sys, "argv", argv)
    WandbSink(ONLINE, tmp_path, is_main=True, config_dict={"lr": 1, "hub": {"token": "abc"}})
    arguments = fake_wandb.inits[0]
    assert arguments["mode"] == "online"
    assert (arguments["project"], arguments["entity"], arguments["group"]) == ("dbsp_megatron", "team", "g")
    assert arguments["tags"] == ["a"]
    assert arguments["dir"] == str(tmp_path)
    assert arguments["name"] == tmp_path.name
    assert arguments["config"] == {"lr": 1, "hub": {"token": "***"}}
    # "silent" and "finish_timeout" are unknown to this version and left out.
    assert arguments["settings"].values == {"init_timeout": 30.0, "console": "off"}
    assert fake_wandb.argv_at_init == ["train", "--hub-token", "***"]
    assert sys.argv is argv


def test_a_restart_resumes_the_same_run(tmp_path: Path, fake_wandb: Any) -> None:
    """Trap B109: the id is made once and passed with resume="allow"."""
    for _ in range(2):
        MetricLogger(RunFolder(tmp_path, "same"), ONLINE).close()
    MetricLogger(RunFolder(tmp_path, "other"), ONLINE).close()
    first, second, other = (arguments["id"] for arguments in fake_wandb.inits)
    assert first == second == (tmp_path / "same" / "wandb_id").read_text().strip()
    assert other != first
    assert {arguments["resume"] for arguments in fake_wandb.inits} == {"allow"}


def test_run_id_replaces_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "wandb_id").write_text("\x00 ")
    made = run_id(tmp_path)
    assert made.isalnum()
    assert run_id(tmp_path) == made


def test_log_leaves_out_steps_the_resumed_run_has(tmp_path: Path, fake_wandb: Any) -> None:
    """Trap B109: a restart from an older checkpoint logs no step twice."""
    fake_wandb.run_step = 6
    sink = WandbSink(ONLINE, tmp_path, is_main=True)
    for step in range(4, 8):
        sink.log(step, {"a": step})
    assert [step for step, _ in fake_wandb.runs[0].logged] == [6, 7]


def test_a_failed_start_is_a_warning(tmp_path: Path, fake_wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake_wandb.fail_init = True
    folder = RunFolder(tmp_path, "r")
    with caplog.at_level(logging.WARNING, "dbsp_megatron"), MetricLogger(folder, ONLINE) as metrics:
        metrics.log(1, {"a": 1})
    assert "could not start (no such host)" in caplog.text
    assert (folder.path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1}\n'


def test_a_failure_while_logging_is_one_warning(
    tmp_path: Path, fake_wandb: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path, "r")
    with caplog.at_level(logging.WARNING, "dbsp_megatron"), MetricLogger(folder, ONLINE) as metrics:
        fake_wandb.runs[0].fail_log = True
        for step in (1, 2, 3):
            metrics.log(step, {"a": 1})
    assert caplog.text.count("stopped taking metrics") == 1
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 3


def test_finish_gives_up_on_a_dead_network(tmp_path: Path, fake_wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Trap B111: closing waits no longer than the limit, then the run goes on."""
    metrics = MetricLogger(RunFolder(tmp_path, "r"), ONLINE)
    run = fake_wandb.runs[0]
    run.hang = True
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "dbsp_megatron"):
        metrics.close(timeout_s=0.2)
    assert time.monotonic() - start < 5
    assert "did not finish within" in caplog.text
    metrics.close()
    assert run.exit_codes == [0]
    run.release.set()


_OFFLINE_RUN = """
import atexit, sys, time
# Registered before wandb's own hook, so it runs after it.
atexit.register(lambda: print("exit took", time.monotonic() - ended))
from dbsp_megatron.observability import MetricLogger, RunFolder, WandbConfig

with MetricLogger(RunFolder(sys.argv[1], "r"), WandbConfig(mode="online"), resume_step=int(sys.argv[2])) as metrics:
    metrics.log(int(sys.argv[2]) + 1, {"train/loss": float("nan")})
    ended = time.monotonic()
    sys.exit(3)
"""


def test_real_offline_run_ends_soon_with_its_own_exit_code(tmp_path: Path) -> None:
    """Trap B111: WANDB_MODE=offline and no network: the process ends at once and its exit code is unchanged."""
    pytest.importorskip("wandb")
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", _OFFLINE_RUN, str(tmp_path), "0", "--hub-token=offline-secret-value"]
    done = subprocess.run(command, env=environ, timeout=110, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert float(done.stdout.split("exit took")[1]) < 30
    made = list((tmp_path / "r" / "wandb").glob("offline-run-*"))
    assert len(made) == 1
    assert made[0].name.endswith((tmp_path / "r" / "wandb_id").read_text().strip())
    files = [file for file in made[0].rglob("*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in files)
    assert not [file.name for file in files if b"offline-secret-value" in file.read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks up processes in /proc")
def test_a_stuck_helper_process_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    """Trap B111: wandb waits for its helper at exit, without limit; a hung finish must end the helper."""
    helper = shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / "wandb-core")
    (tmp_path / "wandb.py").write_text(
        textwrap.dedent(f"""
        import atexit, subprocess, threading

        class Settings:
            model_fields = ()

        class Run:
            step = 0

            def log(self, values, step):
                pass

            def finish(self, exit_code):
                threading.Event().wait()

        def init(**arguments):
            process = subprocess.Popen([{str(helper)!r}, "100"], start_new_session=True)
            atexit.register(process.wait)
            return Run()
        """)
    )
    script = textwrap.dedent("""
        import sys
        from dbsp_megatron.observability.wandb_sink import WandbConfig, WandbSink
        from pathlib import Path

        sink = WandbSink(WandbConfig(mode="online"), Path(sys.argv[1]), is_main=True)
        sink.finish(timeout_s=0.1)
        sys.exit(5)
        """)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environ, timeout=90, capture_output=True)
    assert done.returncode == 5, done.stderr


@pytest.mark.parametrize("key", ["image_every", "alert_imbalance", "alert_prediction_error"])
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_config_refuses_negative_limits(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"wandb\.{key} must be >= 0"):
        WandbConfig(**{key: value})


def test_start_tells_what_to_keep_of_each_metric(tmp_path: Path, fake_wandb: Any) -> None:
    WandbSink(ONLINE, tmp_path, is_main=True)
    summaries = fake_wandb.runs[0].summaries
    assert (summaries["train/loss"], summaries["perf/step_s"]) == ("min", "mean")
    assert "sp/plan_reuse" not in summaries


def test_alert_reaches_the_run_and_a_failure_is_a_warning(
    tmp_path: Path, fake_wandb: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sink = WandbSink(ONLINE, tmp_path, is_main=True)
    sink.alert("a", "b")
    assert fake_wandb.runs[0].alerts == [("a", "b")]
    fake_wandb.runs[0].alert = None
    with caplog.at_level(logging.WARNING, "dbsp_megatron"):
        sink.alert("a", "b")
        sink.log_images(1, {"images/a": tmp_path / "a.png"})
    assert "took no alert" in caplog.text
    # The stand-in has no Image.
    assert "took no pictures of step 1" in caplog.text
    assert sink.active


_OFFLINE_EXTRAS = """
import sys
from pathlib import Path
from dbsp_megatron.observability.plot_balance import plot_rank_loads
from dbsp_megatron.observability.wandb_sink import WandbConfig, WandbSink

folder = Path(sys.argv[1])
plot_rank_loads([1, 2], folder / "loads.png")
sink = WandbSink(WandbConfig(mode="offline"), folder, is_main=True)
sink.log(1, {"train/loss": 2.0})
sink.log_images(1, {"images/rank_load": folder / "loads.png"})
sink.alert("title", "text")
sink.log(2, {"train/loss": 1.0})
print("active", sink.active)
sink.finish()
"""


def test_real_offline_run_takes_pictures_and_alerts_and_can_be_synced_later(tmp_path: Path) -> None:
    """Trap B111: no network; what `wandb sync` reads is complete when the process has ended."""
    pytest.importorskip("wandb")
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", _OFFLINE_EXTRAS, str(tmp_path)]
    done = subprocess.run(command, env=environ, timeout=250, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "active True" in done.stdout
    assert "W&B" not in done.stderr
    (made,) = (tmp_path / "wandb").glob("offline-run-*")
    (records,) = made.glob("*.wandb")
    data = records.read_bytes()
    for expected in (b"train/loss", b"images/rank_load", b"title"):
        assert expected in data, expected
    assert list((made / "files" / "media" / "images").rglob("*.png"))
    sync = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--help"], env=environ, timeout=250, capture_output=True, text=True
    )
    assert sync.returncode == 0, sync.stderr
    assert "PATH" in sync.stdout
