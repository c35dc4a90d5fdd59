"""Prompts of a batch: read from a file, given what they do not name, and a name of their own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dbsp_megatron.config.generate import GenerateConfig
from dbsp_megatron.infer.outputs import TAKEN_ENDS
from dbsp_megatron.infer.pictures import check_picture

_KEYS = {"prompt": str, "negative_prompt": str, "seed": int, "image": str, "name": str}
_MAX_NAME = 100
_MAX_WORDS = 40


@dataclass(frozen=True, kw_only=True)
class PromptJob:
    """One video or image to make."""

    prompt: str
    negative_prompt: str
    seed: int
    image: str
    name: str
    """Of its files; made of what determines it unless it was given, so that it does not depend on its place."""


def read_jobs(config: GenerateConfig) -> list[PromptJob]:
    """The prompt of a configuration, or those of its file; seeds of -1 stay.

    Raises:
        ValueError: the file cannot be read, a line is not understood, or two prompts have one name.
    """
    if not config.prompts:
        return [_job({"prompt": config.prompt}, config, "generate.prompt")]
    path = Path(config.prompts)
    try:
        # Only line feeds end a line: splitlines() would also cut at characters that texts and JSON strings may hold.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"generate.prompts={path} must be a text file in UTF-8, it cannot be read: {error}") from error
    places = [(f"{path.name}, line {number}", line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not places:
        raise ValueError(f"generate.prompts={path} must hold a prompt on each line, it is empty")
    jobs = [_job(_fields(line, place), config, place) for place, line in places]
    _check_names(jobs, [place for place, _ in places])
    return jobs


def with_seeds(jobs: Sequence[PromptJob], drawn: int) -> list[PromptJob]:
    """The jobs with a seed that was drawn in place of -1."""
    return [job if job.seed >= 0 else replace(job, seed=drawn) for job in jobs]


def _fields(line: str, place: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {"prompt": line}
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: a line that starts with a brace must be a JSON object, got {error}") from error
    for key, value in found.items():
        if key not in _KEYS:
            raise ValueError(f"{place}: unknown key {key!r}; a prompt has {', '.join(_KEYS)}, other settings are flags")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise ValueError(f"{place}: {key} must be a {_KEYS[key].__name__}, got {value!r}")
    if not found.get("prompt", "").strip():
        raise ValueError(f'{place}: prompt must be a text, got none; write for example {{"prompt": "a cat"}}')
    return dict(found)


def _job(given: dict[str, Any], config: GenerateConfig, place: str) -> PromptJob:
    inherited = {key: getattr(config, key) for key in ("negative_prompt", "seed", "image")}
    job = PromptJob(**{"name": "", **inherited, **given})
    if job.seed < -1 or job.seed >= 2**63:
        raise ValueError(f"{place}: seed must be in [0, 2^63), or -1 for a random one, got {job.seed}")
    for key in _KEYS:
        if any(0xD800 <= ord(letter) < 0xE000 for letter in str(getattr(job, key))):
            raise ValueError(f"{place}: {key} must be text, it holds half a character (a lone surrogate); write UTF-8")
    if job.image:
        check_picture(job.image, place)
    if not job.name:
        return replace(job, name=_name_of(job))
    plain = "/" not in job.name and job.name.isprintable() and not job.name.startswith(".")
    if not plain or len(job.name.encode()) > _MAX_NAME or job.name.lower().endswith(TAKEN_ENDS):
        raise ValueError(
            f"{place}: name must be a file name of at most {_MAX_NAME} bytes without '/', a dot in front or one of "
            f"{', '.join(TAKEN_ENDS)} at its end, got {job.name!r}"
        )
    return job


def _name_of(job: PromptJob) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", job.prompt.lower())[:_MAX_WORDS].strip("-") or "prompt"
    digest = hashlib.sha256(json.dumps(asdict(job), sort_keys=True).encode()).hexdigest()
    return f"{words}-{digest[:8]}"


def _check_names(jobs: Sequence[PromptJob], places: Sequence[str]) -> None:
    first: dict[str, str] = {}
    for job, place in zip(jobs, places, strict=True):
        # File systems may not tell capitals from small letters.
        key = job.name.casefold()
        if key in first:
            raise ValueError(
                f"{place}: the name {job.name!r} is that of {first[key]}: outputs need names of their own; "
                "change the prompt, seed or name of one"
            )
        first[key] = place
