"""Agreement of ranks before a collective: all raise the same error, or none does."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from dbsp_megatron.comm.collectives import gather_vectors

_TEXT_BYTES = 1024


def digest_int(*parts: object) -> int:
    """63-bit hash of the parts' repr, equal across processes and PYTHONHASHSEED."""
    raw = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1


def _gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    raw = text.encode()[:_TEXT_BYTES]
    padded = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    padded[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    rows = gather_vectors(padded, group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def agree(where: str, problem: str | None, beliefs: dict[str, int], group: dist.ProcessGroup | None) -> None:
    """Make sure that no rank has a problem and that all believe the same.

    One gather of len(beliefs) + 1 integers, on the host. Every rank must call it with the same belief names.

    Args:
        where: what is about to happen, for the message ("attention layer 3, step 10").
        problem: this rank's own error, or None.
        beliefs: name -> integer (or `digest_int`) that must be equal on all ranks.
        group: ranks that must agree, best one whose backend moves CPU tensors. None for a single rank.

    Raises:
        ValueError: on every rank alike: a rank has a problem, or beliefs differ.
    """
    if group is None or group.size() == 1:
        if problem:
            raise ValueError(problem)
        return
    row = torch.tensor([0 if problem is None else 1, *beliefs.values()], dtype=torch.int64)
    rows = gather_vectors(row, group)
    ranks = dist.get_process_group_ranks(group)
    if bool(rows[:, 0].any()):
        texts = _gather_texts(problem or "", group)
        first = next(i for i, text in enumerate(texts) if rows[i, 0])
        raise ValueError(f"{texts[first]} [{where}, rank {ranks[first]}]" if where else texts[first])
    for column, name in enumerate(beliefs, start=1):
        values = rows[:, column].tolist()
        if len(set(values)) > 1:
            common = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
            odd = [ranks[i] for i, value in enumerate(values) if value != common]
            prefix = f"{where}: " if where else ""
            raise ValueError(
                f"{prefix}ranks disagree about {name} (rank(s) {odd} differ from rank {ranks[values.index(common)]}): "
                f"give every rank the same {name}"
            )
