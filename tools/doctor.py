"""Looks whether this machine can train: software, GPUs, links, limits, disks, and a short test on N processes.

Usage:
    python tools/doctor.py                      everything, on two processes (or one for each GPU, up to 8)
    python tools/doctor.py --quick              without imports of optional packages and without the test
    python tools/doctor.py --nproc 4 --json

Every line is ok, warn or fail, with what to do about it. Exit code 0 if nothing failed, else 1. Secrets are masked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# A broken installation must not keep the doctor from running: only the standard library is imported before it is looked
# at, and everything that may hang or crash runs in processes of its own.
_ROOT = str(Path(__file__).resolve().parents[1])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

from tools import doctor_machine, doctor_packages, doctor_selftest, doctor_settings  # noqa: E402
from tools.doctor_check import FAIL, OK, WARN, Check, masked  # noqa: E402

_MAX_PROCESSES = 8


def examine(*, quick: bool, num_processes: int | None, run_root: Path, timeout_s: float) -> list[Check]:
    """All checks, in the order in which they are shown.

    Args:
        quick: leave out what takes more than a few seconds.
        num_processes: of the test; None: one for each GPU, at least 2.
        run_root: folder of the runs.
        timeout_s: seconds that the test may take.
    """
    checks, torch = doctor_packages.check_packages(quick=quick)
    gpus, of_gpus = doctor_machine.check_gpus()
    checks += of_gpus
    checks += doctor_machine.check_torch_sees(len(gpus), torch)
    checks += doctor_machine.check_links(len(gpus))
    checks += doctor_settings.check_environment()
    checks += doctor_settings.check_limits()
    checks += doctor_settings.check_disks(run_root)
    checks += doctor_settings.check_slurm()
    if not quick:
        number = num_processes or max(2, min(len(gpus), _MAX_PROCESSES))
        checks += doctor_selftest.check_processes(number, timeout_s)
    return [masked(check) for check in checks]


def as_text(checks: Sequence[Check]) -> str:
    """Aligned lines under a heading for each group, without a final newline."""
    lines, width = [], max(len(check.name) for check in checks)
    for group in dict.fromkeys(check.group for check in checks):
        lines.append(f"{group}")
        for check in (check for check in checks if check.group == group):
            lines.append(f"  {check.status:<4}  {check.name:<{width}}  {check.found}".rstrip())
            if check.remedy and check.status != OK:
                lines.append(f"  {'':<4}  {'':<{width}}  -> {check.remedy}")
    counts = {status: sum(check.status == status for check in checks) for status in (OK, WARN, FAIL)}
    lines.append(", ".join(f"{number} {status}" for status, number in counts.items()))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: no imports of packages, no test")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.add_argument("--nproc", type=int, help="processes of the test (default: the GPUs, at least 2)")
    parser.add_argument("--run-root", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that the test may take (default: 120)")
    given = parser.parse_args(argv)
    if given.nproc is not None and not 1 <= given.nproc <= 64:
        parser.error(f"--nproc must be 1 to 64, got {given.nproc}")
    checks = examine(quick=given.quick, num_processes=given.nproc, run_root=given.run_root, timeout_s=given.timeout)
    if given.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        print(as_text(checks))
    return int(any(check.status == FAIL for check in checks))


if __name__ == "__main__":
    sys.exit(main())
