"""Weights & Biases as an optional, never fatal, receiver of metrics."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .atomic_file import write_text
from .logging import get_logger
from .metric_names import METRICS
from .redact import redact_command, redact_mapping

FINISH_TIMEOUT_S = 25.0
_INIT_TIMEOUT_S = 30.0
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Whether and where metrics go to Weights & Biases (metrics.jsonl is written in any case)."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """disabled: wandb is not even imported; offline: files for a later `wandb sync`; online: sent while training."""
    project: str = "dbsp_megatron"
    """Project name."""
    entity: str | None = None
    """User or team; default: the account's own."""
    group: str | None = None
    """Name that groups runs of one experiment."""
    tags: list[str] = field(default_factory=list)
    """Labels of the run."""
    image_every: int = 0
    """Steps between pictures: imbalance of layers over steps, load of ranks, masks and who computes them; 0 for none.
    With mode=disabled none are made."""
    alert_imbalance: float = 1.5
    """Warn, in the log and by a W&B alert, when the imbalance of the worst layer under its plan stays above this; 0
    never."""
    alert_prediction_error: float = 0.2
    """The same when predicted and measured attention times differ by more than this fraction (sp.strategy=auto); 0
    never."""

    def __post_init__(self) -> None:
        if self.mode not in ("disabled", "offline", "online"):
            raise ValueError(f"wandb.mode must be disabled, offline or online, got {self.mode!r}; set one of these")
        if not self.project:
            raise ValueError("wandb.project must not be empty, got ''; name a project")
        if isinstance(self.tags, str) or not all(isinstance(tag, str) and tag for tag in self.tags):
            raise ValueError(f"wandb.tags must be a list of non-empty strings, got {self.tags!r}; write [a, b]")
        for key in ("image_every", "alert_imbalance", "alert_prediction_error"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"wandb.{key} must be >= 0, got {getattr(self, key)!r}; 0 turns it off")


class WandbSink:
    """One W&B run, made on the main rank only; does nothing on other ranks or when disabled.

    The run's id is kept in `<folder>/wandb_id`, so that a restart continues the same run. A failure of W&B, at the
    start or later, becomes a warning and ends sending; training goes on.
    """

    def __init__(
        self, config: WandbConfig, folder: Path, *, is_main: bool, config_dict: Mapping[str, Any] | None = None
    ) -> None:
        """Start or resume the run.

        Args:
            config: where to send.
            folder: run folder; its name is the display name, W&B's own files go to `<folder>/wandb`.
            is_main: True on global rank 0 only.
            config_dict: settings shown with the run; secrets are masked.

        Raises:
            ValueError: wandb is asked for but not installed (on every rank, so that all stop together).
        """
        self._run: Any = None
        mode = _effective_mode(config)
        if mode == "disabled":
            return
        if sys.modules.get("wandb") is None and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"wandb.mode={config.mode} needs the wandb package, which is not installed; "
                "run `pip install wandb` or set wandb.mode=disabled"
            )
        if not is_main:
            return
        try:
            wandb: Any = importlib.import_module("wandb")
            with _masked_command_line():
                self._run = wandb.init(
                    mode=mode,
                    project=config.project,
                    entity=config.entity,
                    group=config.group,
                    tags=list(config.tags) or None,
                    name=folder.name,
                    dir=str(folder),
                    id=run_id(folder),
                    resume="allow",
                    config=redact_mapping(config_dict or {}),
                    settings=_settings(wandb),
                )
        except Exception as error:
            _log.warning("W&B could not start (%s); metrics go to metrics.jsonl only", error)
            return
        self._define_metrics()

    @property
    def active(self) -> bool:
        """Whether metrics are being sent."""
        return self._run is not None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send one step; steps the resumed run already has are left out, as W&B would refuse them.

        Args:
            step: training step.
            values: numbers, strings or lists.
        """
        if self._run is None:
            return
        try:
            if step >= int(getattr(self._run, "step", 0) or 0):
                self._run.log(dict(values), step=step)
        except Exception as error:
            _log.warning("W&B stopped taking metrics (%s); they go to metrics.jsonl only", error)
            self.finish(exit_code=1)

    def log_images(self, step: int, images: Mapping[str, Path]) -> None:
        """Send pictures with the values of a step.

        Args:
            step: training step.
            images: PNG files by key.
        """
        if self._run is None or not images:
            return
        try:
            wandb: Any = importlib.import_module("wandb")
            values = {key: wandb.Image(str(path)) for key, path in images.items()}
        except Exception as error:
            _log.warning("W&B took no pictures of step %d (%s)", step, error)
            return
        self.log(step, values)

    def alert(self, title: str, text: str) -> None:
        """Raise an alert, which W&B may mail; a failure is a line in the log.

        Args:
            title: a few words.
            text: what to do.
        """
        if self._run is None:
            return
        try:
            self._run.alert(title=title, text=text)
        except Exception as error:
            _log.warning("W&B took no alert (%s)", error)

    def _define_metrics(self) -> None:
        """Tell W&B what to keep of each metric when the run is over; charts are grouped by the prefix of their keys."""
        try:
            for metric in METRICS.values():
                if metric.kind == "number" and metric.summary != "last":
                    self._run.define_metric(metric.name, summary=metric.summary)
        except Exception as error:
            _log.warning("W&B took no summaries of metrics (%s)", error)

    def finish(self, *, exit_code: int = 0, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """End the run, waiting at most `timeout_s` seconds; never raises, and may be called again.

        Args:
            exit_code: 0 if training ended well; shown by W&B, without effect on this process.
            timeout_s: how long to wait for data still to be sent.
        """
        run, self._run = self._run, None
        if run is None:
            return
        failure: list[Exception] = []

        def finish_run() -> None:
            try:
                run.finish(exit_code=exit_code)
            except Exception as error:
                failure.append(error)

        # A daemon thread: if W&B hangs on a dead network, neither this call nor the interpreter's exit waits for it.
        thread = threading.Thread(target=finish_run, name="wandb-finish", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            _log.warning("W&B did not finish within %.0f s; `wandb sync` can send the rest later", timeout_s)
            _end_service()
        elif failure:
            _log.warning("W&B did not finish cleanly (%s)", failure[0])


def run_id(folder: Path) -> str:
    """Return the run's W&B id, made once and kept in `<folder>/wandb_id`."""
    path = folder / "wandb_id"
    if path.exists():
        kept = path.read_text(encoding="utf-8").strip()
        if re.fullmatch(r"[\w-]{1,64}", kept):
            return kept
        _log.warning("%s holds no W&B run id; a new one is made", path.name)
    made = uuid.uuid4().hex[:12]
    write_text(path, made + "\n")
    return made


def _effective_mode(config: WandbConfig) -> str:
    """The configured mode, or the lower one that W&B's own variable WANDB_MODE asks for on this machine."""
    asked = os.environ.get("WANDB_MODE", "")
    order = ("disabled", "offline", "online")
    return min(config.mode, asked, key=order.index) if asked in order else config.mode


def _settings(wandb: Any) -> Any:
    """W&B settings that bound waiting; names this version of wandb does not know are left out."""
    wanted = {
        "init_timeout": _INIT_TIMEOUT_S,
        "finish_timeout": FINISH_TIMEOUT_S - 5,
        # Console capture would wrap the progress bar's stream and upload text we did not check for secrets.
        "console": "off",
        "silent": True,
    }
    known = getattr(wandb.Settings, "model_fields", None) or getattr(wandb.Settings, "__annotations__", {})
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


@contextmanager
def _masked_command_line() -> Iterator[None]:
    """Hide secret flags from W&B, which reads `sys.argv` when a run starts and uploads it."""
    saved = sys.argv
    sys.argv = redact_command(saved)
    try:
        yield
    finally:
        sys.argv = saved


def _end_service(grace_s: float = 2.0) -> None:
    """End W&B's helper process: the library waits for it, without limit, when the interpreter exits."""
    helpers = _child_processes("wandb-core")
    for pid in helpers:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while helpers and time.monotonic() < deadline:
        time.sleep(0.05)
        helpers = [pid for pid in helpers if pid in _child_processes("wandb-core")]
    for pid in helpers:
        _signal(pid, signal.SIGKILL)


def _child_processes(name: str) -> list[int]:
    """Ids of this process's live children called `name`; empty where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = entry.read_text().rpartition(") ")
        except OSError:
            continue
        state, parent = after.split()[:2]
        if before.partition(" (")[2] == name and int(parent) == os.getpid() and state != "Z":
            found.append(int(entry.parent.name))
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
