"""Reads Slurm's compressed lists: the names of a job's nodes and the number of tasks on each.

`python -m dbsp_megatron.train.slurm` prints the job's nodes, one a line; the batch script asks it where scontrol fails.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from itertools import product

_TASKS = re.compile(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?")
# Commas inside brackets separate numbers, not nodes.
_NODE = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_NODES = 100_000


def parse_tasks_per_node(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Number of tasks on each node: `2(x3),1` is [2, 2, 2, 1].

    Args:
        text: value of the variable.
        variable: its name, for the error.

    Raises:
        ValueError: `text` is not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None or len(counts) + int(match[2] or 1) > _MOST_NODES:
            raise ValueError(f"{variable} must look like '2(x3),1', got {text!r}; is it set by hand?")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodelist(text: str, variable: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Names of nodes in the order given: `gpu[01-03,7],cpu5` is gpu01, gpu02, gpu03, gpu7, cpu5.

    Several brackets in a name count up from the right, as scontrol does: `r[1-2]n[1-2]` is r1n1, r1n2, r2n1, r2n2.

    Args:
        text: value of the variable.
        variable: its name, for the error.

    Raises:
        ValueError: `text` is not of that form.
    """
    parts = _NODE.findall(text)
    if not parts or ",".join(parts) != text:
        raise ValueError(f"{variable} must look like 'gpu[01-03,7],cpu5', got {text!r}; is it set by hand?")
    names: list[str] = []
    for part in parts:
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        choices = [_numbers(piece, text, variable) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in product(*choices)]
    return names


def job_nodes(environ: Mapping[str, str]) -> list[str]:
    """Names of this job's nodes.

    Args:
        environ: environment of a batch script.

    Raises:
        ValueError: there is no list of nodes, it is malformed, or SLURM_TASKS_PER_NODE counts other nodes.
    """
    if "SLURM_JOB_NODELIST" not in environ:
        raise ValueError("SLURM_JOB_NODELIST must be set, got nothing; run this inside a Slurm job")
    names = expand_nodelist(environ["SLURM_JOB_NODELIST"])
    if "SLURM_TASKS_PER_NODE" in environ:
        counts = parse_tasks_per_node(environ["SLURM_TASKS_PER_NODE"])
        if len(counts) != len(names):
            raise ValueError(
                f"SLURM_TASKS_PER_NODE must count the {len(names)} nodes of SLURM_JOB_NODELIST, "
                f"got {environ['SLURM_TASKS_PER_NODE']!r} for {len(counts)}; is one of them set by hand?"
            )
    return names


def _numbers(text: str, whole: str, variable: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + _MOST_NODES:
            raise ValueError(f"{variable} must hold rising ranges such as [01-03,7], got {whole!r}; is it set by hand?")
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found


def main() -> None:
    """Print the nodes of this job, one a line."""
    try:
        print("\n".join(job_nodes(os.environ)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
