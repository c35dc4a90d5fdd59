"""GPUs as the driver shows them, and the links between them and to other nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.doctor_check import FAIL, NOT_THERE, OK, WARN, Check, Done, last_line, run

GPUS, LINKS = "GPUs", "Links"
_SECONDS = 20.0
_FIELDS: tuple[str, ...] = (
    *("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit", "power.default_limit"),
    *("clocks.max.sm", "clocks_throttle_reasons.hw_slowdown", "mig.mode.current"),
)
_FEWER_FIELDS = _FIELDS[:5]
_LEAST_CAPABILITY = 8.0
_HOPPER = "9.0"
_BUSY_SHARE = 0.2
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_INFINIBAND, _NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of nvidia-smi; what it does not know is empty."""

    fields: dict[str, str]
    """Values by name of the query, units left out."""

    def text(self, name: str) -> str:
        """A value, empty if there is none."""
        value = self.fields.get(name, "")
        return "" if value.startswith(("[", "N/A")) else value

    def number(self, name: str) -> float | None:
        """A value as a number."""
        try:
            return float(self.text(name))
        except ValueError:
            return None


def check_gpus() -> tuple[list[Gpu], list[Check]]:
    """The GPUs that nvidia-smi lists, and one check for each."""
    done, fields = _query(_FIELDS), _FIELDS
    if done.code not in (0, None):
        # Drivers refuse a query with a field that they do not know.
        done, fields = _query(_FEWER_FIELDS), _FEWER_FIELDS
    if done.code is None and NOT_THERE in done.err:
        found = f"none seen: {done.err}; everything runs on the CPU"
        return [], [Check(group=GPUS, name="nvidia-smi", status=OK, found=found)]
    if done.code != 0:
        why = last_line(done.out) or last_line(done.err) if done.code is not None else done.err
        remedy = "look at `nvidia-smi` and `dmesg`; the driver may not be loaded, or a GPU may have fallen off the bus"
        return [], [Check(group=GPUS, name="nvidia-smi", status=FAIL, found=why, remedy=remedy)]
    gpus = []
    for line in done.out.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields):
            gpus.append(Gpu(fields=dict(zip(fields, values, strict=True))))
    if not gpus:
        found = f"it lists no GPU: {last_line(done.out) or 'no output'}"
        remedy = "ask for GPUs (--gpus-per-node), or look at CUDA_VISIBLE_DEVICES of the container"
        return [], [Check(group=GPUS, name="nvidia-smi", status=WARN, found=found, remedy=remedy)]
    return gpus, [_gpu_check(gpu) for gpu in gpus] + _alike(gpus)


def _query(fields: tuple[str, ...]) -> Done:
    return run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], _SECONDS)


def _gpu_check(gpu: Gpu) -> Check:
    total, used = gpu.number("memory.total"), gpu.number("memory.used")
    capability, errors = gpu.number("compute_cap"), gpu.number("ecc.errors.uncorrected.volatile.total")
    limit, usual = gpu.number("power.limit"), gpu.number("power.default_limit")
    problems = []
    if capability is not None and capability < _LEAST_CAPABILITY:
        problems.append(("kernels need compute capability 8.0 or more", "attention runs in plain PyTorch here: slow"))
    if total and used and used > _BUSY_SHARE * total:
        problems.append((f"{used:.0f} MiB are in use", "end what uses it: `nvidia-smi` lists processes"))
    if errors:
        problems.append((f"{errors:.0f} uncorrected memory errors", "have the node drained and the GPU checked"))
    if gpu.text("ecc.mode.current") == "Disabled":
        problems.append(("ECC is off", "bit flips go unnoticed: `nvidia-smi -e 1` and a reset turn it on"))
    if limit and usual and limit < usual:
        problems.append((f"power limit {limit:.0f} W of {usual:.0f} W", "expect lower clocks: `nvidia-smi -pl`"))
    if gpu.text("clocks_throttle_reasons.hw_slowdown") == "Active":
        problems.append(("the hardware slows its clocks", "look at cooling and power supply"))
    if gpu.text("mig.mode.current") == "Enabled":
        problems.append(("it is cut into MIG instances", "instances have no links to one another: one process only"))
    facts = [gpu.text("name"), f"{(total or 0) / 1024:.0f} GiB", f"driver {gpu.text('driver_version')}"]
    if capability is not None:
        kernels = "Hopper kernels" if gpu.text("compute_cap") == _HOPPER else "portable kernels"
        facts.append(f"compute capability {gpu.text('compute_cap')} ({kernels})")
    if gpu.text("clocks.max.sm"):
        facts.append(f"up to {gpu.text('clocks.max.sm')} MHz")
    return Check(
        group=GPUS,
        name=f"GPU {gpu.text('index')}",
        status=WARN if problems else OK,
        found=", ".join([*facts, *(what for what, _ in problems)]),
        remedy="; ".join(remedy for _, remedy in problems),
    )


def _alike(gpus: list[Gpu]) -> list[Check]:
    names = {gpu.text("name") for gpu in gpus}
    if len(names) == 1:
        return []
    remedy = "the slowest sets the pace; use CUDA_VISIBLE_DEVICES to leave it out"
    return [Check(group=GPUS, name="same model", status=WARN, found=" and ".join(sorted(names)), remedy=remedy)]


def check_torch_sees(num_gpus: int, torch: dict[str, Any] | None) -> list[Check]:
    """Whether torch can use the GPUs.

    Args:
        num_gpus: GPUs of nvidia-smi.
        torch: what its import told; None if that failed.
    """
    if torch is None or not num_gpus:
        return []
    seen = int(torch["devices"])
    if seen:
        return [Check(group=GPUS, name="torch", status=OK, found=f"sees {seen} of {num_gpus}")]
    why = "it was built for the CPU" if not torch["cuda"] else f"it was built for CUDA {torch['cuda']}"
    remedy = "install a CUDA build of torch" if not torch["cuda"] else "the driver may be too old for that: update it"
    return [Check(group=GPUS, name="torch", status=FAIL, found=f"sees none of {num_gpus}: {why}", remedy=remedy)]


def check_links(num_gpus: int) -> list[Check]:
    """NVLink or PCIe between the GPUs, InfiniBand, and network interfaces."""
    checks = []
    if num_gpus > 1:
        done = run(["nvidia-smi", "topo", "-m"], _SECONDS)
        checks.append(_topology(done.out, num_gpus, done.err))
    return checks + check_infiniband() + check_interfaces()


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Kind of link of each pair of GPUs (a below b), as `nvidia-smi topo -m` prints them: NV18, PIX, PHB, SYS, ..."""
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    header = next((line.split() for line in lines if line.split()[:1] == ["GPU0"]), [])
    if not header:
        return {}
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for line in lines:
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]) or words == header:
            continue
        row = int(words[0][3:])
        for column, cell in zip(columns, words[1:], strict=False):
            if row < column and not cell.startswith("GPU"):
                links[row, column] = cell
    return links


def _topology(text: str, num_gpus: int, problem: str) -> Check:
    links = parse_topology(text)
    if not links:
        found = f"nvidia-smi topo -m told nothing: {last_line(problem) or last_line(text) or 'no output'}"
        return Check(group=LINKS, name="between GPUs", status=WARN, found=found, remedy="measure: tools/fit_latency.py")
    kinds = {kind: sum(value == kind for value in links.values()) for kind in dict.fromkeys(links.values())}
    found = f"{num_gpus} GPUs: " + ", ".join(f"{number} pairs {kind}" for kind, number in kinds.items())
    if all(kind.startswith("NV") for kind in kinds):
        return Check(group=LINKS, name="between GPUs", status=OK, found=f"{found} (NVLink)")
    slow = [pair for pair, kind in links.items() if not kind.startswith("NV")]
    remedy = (
        f"{len(slow)} pairs have no NVLink (GPUs {slow[0][0]} and {slow[0][1]}): prefer a ring to Ulysses across them, "
        "and measure with tools/fit_latency.py"
    )
    return Check(group=LINKS, name="between GPUs", status=WARN, found=found, remedy=remedy)


def check_infiniband(root: Path = _INFINIBAND) -> list[Check]:
    """InfiniBand and RoCE ports."""
    ports = sorted(root.glob("*/ports/*")) if root.is_dir() else []
    if not ports:
        found = "no devices: nodes talk over TCP" if root == _INFINIBAND else "no devices"
        return [Check(group=LINKS, name="InfiniBand", status=OK, found=found)]
    checks = []
    for port in ports:
        state, rate, layer = (_read(port / name) for name in ("state", "rate", "link_layer"))
        up = "ACTIVE" in state.upper()
        checks.append(
            Check(
                group=LINKS,
                name=f"{port.parts[-3]} port {port.name}",
                status=OK if up else WARN,
                found=f"{state or 'state unknown'}, {rate or 'rate unknown'}, {layer or 'layer unknown'}",
                remedy="" if up else "leave it out with NCCL_IB_HCA, or have the cable checked",
            )
        )
    return checks


def interfaces(root: Path = _NETWORK) -> dict[str, bool]:
    """Network interfaces, loopback left out, and whether they are up."""
    if not root.is_dir():
        return {}
    # Virtual ones say `unknown` and work.
    return {
        path.name: _read(path / "operstate") in ("up", "unknown")
        for path in sorted(root.iterdir())
        if path.name != "lo"
    }


def check_interfaces(root: Path = _NETWORK) -> list[Check]:
    """Network interfaces that are up."""
    known = interfaces(root)
    up = [name for name, works in known.items() if works]
    down = [name for name, works in known.items() if not works]
    found = f"up: {', '.join(up) or 'none'}" + (f"; down: {', '.join(down)}" if down else "")
    if up or not known:
        return [Check(group=LINKS, name="interfaces", status=OK, found=found)]
    remedy = "only processes of this machine can meet; bring an interface up for several nodes"
    return [Check(group=LINKS, name="interfaces", status=WARN, found=found, remedy=remedy)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
