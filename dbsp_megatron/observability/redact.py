"""Replaces secrets by `***` in command lines, settings and log text."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_ALWAYS = ("password", "passwd", "passphrase", "secret", "credential")
_USUALLY = ("key", "token")
# `num_tokens: 4096` and `key_dim: 64` are sizes; a number under such a name is kept.
_COUNTING_WORDS = frozenset(
    ("tokens", "keys", "num", "count", "max", "min", "len", "length", "dim", "size", "heads", "block", "per", "step")
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|true|false|none|null", re.IGNORECASE)

_URL_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_KNOWN_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[opsru]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|AKIA[A-Z0-9]{16}|wandb_v\d_\w{16,})"
)
# In prose a bare "key: x" is an ordinary sentence ("unknown key: sp.foo"), so there "key" needs a companion word.
_ASSIGNMENT = re.compile(
    r"""(?P<name>[\w.-]*(?:(?:api|access|private|secret|auth|encryption)[_-]?key|token|password|passwd|passphrase|secret|credential)\w*)"""
    r"""(?P<middle>["']?\s*[=:]\s*)(?P<value>"[^"]*"|'[^']*'|[^\s"',;&}\])]+)""",
    re.IGNORECASE,
)


def is_secret(name: str, value: object = None) -> bool:
    """Whether the value of a flag, environment variable or key called `name` must not be shown.

    Args:
        name: flag or key, in any case, with `-`, `_` or `.` between words.
        value: its value; plain numbers under a counting name (`num_tokens`) are not secret.
    """
    lowered = name.lower()
    if any(part in lowered for part in _ALWAYS):
        return True
    if not any(part in lowered for part in _USUALLY):
        return False
    counting = not _COUNTING_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", lowered))
    return not (counting and _NUMBER.fullmatch(str(value)))


def _environment_secrets(environ: Mapping[str, str]) -> list[str]:
    """Values of secret environment variables, longest first; short ones would mask ordinary words."""
    values = {value for name, value in environ.items() if len(value) >= 8 and is_secret(name, value)}
    return sorted((value for value in values if not _NUMBER.fullmatch(value)), key=len, reverse=True)


def _mask_assignment(match: re.Match[str]) -> str:
    value = match["value"]
    if _NUMBER.fullmatch(value.strip("\"'")) and not any(part in match["name"].lower() for part in _ALWAYS):
        return match[0]
    return f"{match['name']}{match['middle']}{MASK}"


def redact_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` with secrets masked.

    Masked are: values of secret environment variables wherever they occur, `name=value` and `name: value` pairs with
    a secret name, user and password in URLs, bearer tokens, and keys of well-known shape.

    Args:
        text: any text.
        environ: environment to take values from; default: this process's.
    """
    for value in _environment_secrets(os.environ if environ is None else environ):
        text = text.replace(value, MASK)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _URL_USER.sub(MASK, text)
    text = _KNOWN_SHAPES.sub(MASK, text)
    return _ASSIGNMENT.sub(_mask_assignment, text)


def redact_command(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a command line with the values of secret flags masked (`--name value`, `--name=value`, `NAME=value`).

    Args:
        argv: words of the command line.
        environ: as in `redact_text`.
    """
    shown: list[str] = []
    value_is_secret = False
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if value_is_secret and not word.startswith("--"):
            shown.append(MASK)
            value_is_secret = False
        elif equals and re.fullmatch(r"[\w.-]+", name) and is_secret(name, value):
            shown.append(f"{name}={MASK}")
            value_is_secret = False
        else:
            following = argv[index + 1] if index + 1 < len(argv) else ""
            value_is_secret = word.startswith("-") and not equals and is_secret(word, following)
            shown.append(redact_text(word, environ))
    return shown


def redact_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested settings with the values of secret names masked; empty values stay as they are."""
    return {str(name): _redact_value(str(name), value) for name, value in values.items()}


def _redact_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact_mapping(value)
    if value in (None, "") or isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple)):
        return [_redact_value(name, item) for item in value]
    if is_secret(name, value):
        return MASK
    return redact_text(value) if isinstance(value, str) else value
