"""What commands that measure on several ranks share: their flags, what they refuse, how they end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from dbsp_megatron import __version__
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from tools.device_timing import Ranks

Files = Mapping[str, Path | None]


class MeasuredConfig(Protocol):
    """What every such command is told."""

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""

    @property
    def dtype(self) -> str:
        """Name of a dtype."""

    @property
    def rounds(self) -> int:
        """Turns of each way."""

    @property
    def budget_ms(self) -> float | None:
        """Milliseconds of a turn; None where a turn is one call."""


Config = TypeVar("Config", bound=MeasuredConfig)


class Measuring(Protocol):
    """A measurement on all ranks; collective."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """What was found; `ms` is None where nothing could be timed."""

    def run(self) -> None:
        """Measure everything."""

    def report(self) -> dict[str, Any]:
        """Everything found, as JSON values."""


def check_measured(config: MeasuredConfig, dtypes: Iterable[str]) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: a dtype that is not of `dtypes`, too few rounds, or CUDA without a device.
    """
    known = tuple(dtypes)
    if config.dtype not in known:
        raise ValueError(f"--dtype must be of {', '.join(known)}, got {config.dtype!r}: use one of them")
    for flag, least in (("rounds", 1), ("budget_ms", 1e-3)):
        value = getattr(config, flag)
        if value is not None and not least <= value < float("inf"):
            raise ValueError(f"--{flag.replace('_', '-')} must be at least {least}, got {value}: raise it")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device and torch finds none: pass --device cpu")


def add_measuring_flags(
    parser: argparse.ArgumentParser, dtypes: Iterable[str], *, rounds: int = 4, budget: bool = True
) -> None:
    """Flags of how it is measured and where it is written.

    Args:
        parser: gets them.
        dtypes: names that `--dtype` takes.
        rounds: turns where none are asked for.
        budget: whether a turn has a length; else it is one call.
    """
    parser.add_argument("--dtype", help=f"of {', '.join(dtypes)} (bfloat16, on CPU float32)")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of every strategy (%(default)s)")
    if budget:
        parser.add_argument("--budget-ms", type=float, default=150, help="milliseconds of a turn (%(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="file of everything that was found")
    parser.add_argument("--markdown", type=Path, help="file of the tables")


def measuring_options(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of a `MeasuredConfig` from the flags."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    return {
        "device": device,
        "dtype": options.dtype or ("bfloat16" if device == "cuda" else "float32"),
        "rounds": options.rounds,
        "budget_ms": getattr(options, "budget_ms", None),
    }


def report_files(options: argparse.Namespace) -> Files:
    """Files to write, by format.

    Raises:
        ValueError: one is a folder.
    """
    files = {"json": options.json, "markdown": options.markdown}
    for flag, path in files.items():
        if path is not None and path.is_dir():
            raise ValueError(f"--{flag} {path} is a folder: name a file in it")
    return files


def measure(
    name: str,
    parse: Callable[[], tuple[Config, Files]],
    make: Callable[[Config, Ranks], Measuring],
    reports: tuple[Callable[[dict[str, Any]], str], Callable[[dict[str, Any]], str]],
    *,
    complete: bool,
) -> int:
    """Run a command on all ranks.

    Args:
        name: of the command, for messages.
        parse: reads the flags.
        make: prepares the measurement.
        reports: text for the terminal, and Markdown.
        complete: everything must have been timed, not just something.

    Returns:
        Exit status: 2 for flags that cannot be, 1 if not enough was timed.
    """
    try:
        config, files = parse()
        ranks = Ranks(config.device)
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    text_report, markdown_report = reports
    try:
        bench = make(config, ranks)
        bench.run()
        report = bench.report()
        if ranks.rank == 0:
            print(text_report(report), flush=True)
            if files["json"] is not None:
                write_text(files["json"], json.dumps(report, indent=1) + "\n")
            if files["markdown"] is not None:
                write_text(files["markdown"], markdown_report(report))
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    finally:
        ranks.close()
    timed = [record["ms"] is not None for record in bench.records]
    return 0 if timed and (all(timed) if complete else any(timed)) else 1


def report_head(config: Any, ranks: Ranks) -> dict[str, Any]:
    """What was run where and with which versions, as JSON values.

    Args:
        config: a dataclass.
        ranks: the ranks.
    """
    found = collect_environment(world_size=ranks.size)
    versions = {name: version for name, version in found["packages"].items() if version}
    versions["dbsp_megatron"] = __version__
    if ranks.device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {
        "config": asdict(config),
        "num_ranks": ranks.size,
        "devices": found["devices"] if ranks.device.type == "cuda" else ["cpu"],
        "git": found["git"],
        "command": found["command"],
        "versions": versions,
    }


def setting(text: str) -> tuple[str, Any]:
    """Key and value of `KEY=VALUE`; a value that is no JSON is text.

    Raises:
        ValueError: there is no key.
    """
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ValueError(f"--set and --dbsp-set take KEY=VALUE, got {text!r}: for example kv_prefetch=1")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def in_a_line(error: BaseException) -> str:
    """An error of any library as one line of a report."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}"
