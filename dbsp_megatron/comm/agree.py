"""Agreement of ranks before a collective: all raise the same error, or none does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from dbsp_megatron.comm.collectives import VectorGather, gather_vectors

_TEXT_BYTES = 1024
_SHOWN_CHARACTERS = 300
_MAX_BELIEFS = 7
"""With more the gathered row would be longer than that of other calls, and ranks in different calls would wait."""
_MAX_RANKS = 8
_MAX_VALUES = 4
"""Different values that a message tells, and ranks that have one of them."""


def digest_int(*parts: object) -> int:
    """63-bit hash of the parts' repr, equal across processes and PYTHONHASHSEED."""
    raw = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1


@dataclass(frozen=True)
class Belief:
    """Something that must be equal on all ranks."""

    value: int
    """What is compared: the thing itself, or `digest_int` of it."""
    shown: Callable[[], str]
    """The thing in words; asked for only if ranks differ."""
    remedy: str
    """What to do about a difference."""


def agree(where: str, problem: str | None, beliefs: Mapping[str, Belief], group: dist.ProcessGroup | None) -> None:
    """Make sure that no rank has a problem and that all believe the same.

    One gather of a few integers, on the host; of texts too, if something is wrong. Ranks that meet here from different
    calls learn of it as well.

    Args:
        where: what is about to happen, for the message ("attention layer 3, step 10").
        problem: this rank's own error, or None.
        beliefs: by name, what must be equal on all ranks; at most 7.
        group: ranks that must agree, best one whose backend moves CPU tensors. None for a single rank.

    Raises:
        ValueError: the same on every rank: a rank has a problem, or beliefs differ.
    """
    Agreement(where, problem, beliefs, group).finish()


class Agreement:
    """What `agree` does, begun: until `finish` a rank may do what others do not see and what can be dropped.

    Every rank that begins one finishes it, whatever happens meanwhile, before it sends anything to others.

    Args:
        where: as there.
        problem: as there.
        beliefs: as there; not asked for words after `finish`.
        group: as there.
    """

    def __init__(
        self, where: str, problem: str | None, beliefs: Mapping[str, Belief], group: dist.ProcessGroup | None
    ) -> None:
        self._question: _Question | None = None
        self._refusal: str | None = None
        self._is_answered = False
        if group is None or group.size() == 1:
            self._refusal = problem or None
            self._is_answered = True
            return
        names = tuple(beliefs)
        if len(names) > _MAX_BELIEFS:
            raise RuntimeError(f"{where}: ranks compare at most {_MAX_BELIEFS} things at a time, got {len(names)}")
        values = [belief.value for belief in beliefs.values()]
        row = [0 if problem is None else 1, _digest_of_names(names), *values, *[0] * (_MAX_BELIEFS - len(values))]
        gather = VectorGather(torch.tensor(row, dtype=torch.int64), group)
        self._question = _Question(where, problem, beliefs, group, gather)

    @property
    def is_open(self) -> bool:
        """Whether nobody has called `finish`."""
        return self._question is not None

    @property
    def is_refused(self) -> bool:
        """Whether `finish` raised, or will, without asking anybody."""
        return self._refusal is not None

    @property
    def is_accepted(self) -> bool:
        """Whether all ranks agree, as far as this one knows."""
        return self._is_answered and self._refusal is None

    @property
    def must_wait(self) -> bool:
        """Whether `finish` would wait for other ranks."""
        return self._question is not None and not self._question.gather.has_arrived

    def finish(self) -> None:
        """Wait for the other ranks; later calls say the same at once.

        Raises:
            ValueError: as `agree`.
        """
        # The words of beliefs hold what they are about, such as tensors.
        question, self._question = self._question, None
        if question is not None:
            self._refusal = _answer(question)
            self._is_answered = True
        if self._refusal is not None:
            raise ValueError(self._refusal)


@dataclass(frozen=True, eq=False)
class _Question:
    """What a rank asks the others; fields as the arguments of `agree`."""

    where: str
    problem: str | None
    beliefs: Mapping[str, Belief]
    group: dist.ProcessGroup
    gather: VectorGather


def _answer(question: _Question) -> str | None:
    """Why the ranks do not agree, in the same words on all of them; None if they do."""
    where, beliefs, group = question.where, question.beliefs, question.group
    rows = question.gather.wait().tolist()
    if not rows[0][0] and all(row == rows[0] for row in rows):
        return None
    ranks = dist.get_process_group_ranks(group)
    has_problem, calls, *columns = ([row[i] for row in rows] for i in range(len(rows[0])))
    if any(has_problem):
        return _problem_of_ranks(where, question.problem, has_problem, ranks, group)
    if len(set(calls)) > 1:
        places = _gather_texts(where, group)
        return (
            f"ranks are in different calls ({_by_value(calls, places, ranks)}): make every rank run the "
            "same calls in the same order"
        )
    name, values = next((name, values) for name, values in zip(beliefs, columns, strict=False) if len(set(values)) > 1)
    texts = _gather_texts(f"{where}\n{_words(beliefs[name])}", group)
    # The place as the first rank sees it, so that the message is one.
    place, *_ = texts[0].split("\n", 1)
    shown = [text.split("\n", 1)[1] for text in texts]
    return f"{place}: ranks disagree about {name} ({_by_value(values, shown, ranks)}): {beliefs[name].remedy}"


def _words(belief: Belief) -> str:
    try:
        return belief.shown()[:_SHOWN_CHARACTERS]
    except Exception as error:  # such as of a user's mask method; the other ranks wait for words
        return f"what raised {type(error).__name__} when asked: {error}"[:_SHOWN_CHARACTERS]


@cache
def _digest_of_names(names: tuple[str, ...]) -> int:
    return digest_int(*names)


def _gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    raw = text.encode()[:_TEXT_BYTES]
    padded = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    padded[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    rows = gather_vectors(padded, group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _problem_of_ranks(
    where: str, problem: str | None, has_one: Sequence[int], ranks: Sequence[int], group: dist.ProcessGroup
) -> str:
    texts = _gather_texts(f"{where}\n{problem or ''}", group)
    first = next(i for i, flag in enumerate(has_one) if flag)
    place, text = texts[first].split("\n", 1)
    others = [other.split("\n", 1)[1] for other in texts]
    alike = [rank for rank, flag, other in zip(ranks, has_one, others, strict=True) if flag and other == text]
    notes = [place] if place else []
    # What all ranks did wrong is no one's in particular.
    if len(alike) < len(ranks):
        notes.append(_named(alike))
    return f"{text} [{', '.join(notes)}]" if notes else text


def _named(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_MAX_RANKS])) + " ..." * (len(ranks) > _MAX_RANKS)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _by_value(values: Sequence[int], texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Which ranks have which value, those of the first rank first."""
    found: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        found.setdefault(value, []).append(index)
    parts = []
    for value, members in found.items():
        text = texts[members[0]]
        # Different things may look alike where the words leave something out.
        if sum(texts[others[0]] == text for others in found.values()) > 1:
            text = f"{text} (digest {value:x})"
        parts.append(f"{_named([ranks[i] for i in members])}: {text}")
    rest = len(parts) - _MAX_VALUES
    return "; ".join(parts[:_MAX_VALUES]) + (f"; and {rest} more" if rest > 0 else "")
