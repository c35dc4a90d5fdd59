"""Reading of a diffusers config: defaults filled in, and keys that our model cannot follow refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Settings:
    """The keys of a transformer's config.json.

    Args:
        config: What the file holds; keys with a leading underscore are notes of diffusers.
        defaults: Every key of the class, with the value that holds where the file has none.

    Raises:
        ValueError: A key is unknown: a setting that is not understood must not be dropped.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        own = {key: value for key, value in config.items() if not key.startswith("_")}
        unknown = sorted(key for key in own if key not in defaults)
        if unknown:
            listed = ", ".join(f"{key}={own[key]!r}" for key in unknown)
            raise ValueError(f"{listed}: unknown to this converter, which knows {', '.join(sorted(defaults))}")
        self._values = {**defaults, **own}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def number(self, key: str) -> int:
        """An integer of at least 1."""
        value = self._values[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} must be an integer >= 1; got {value!r}")
        return value

    def optional_number(self, key: str) -> int | None:
        """Like `number`, or None."""
        return None if self._values[key] is None else self.number(key)

    def require(self, key: str, allowed: Any, *, why: str) -> None:
        """Refuse values that our model cannot follow.

        Raises:
            ValueError: The value is another one.
        """
        found = self._values[key]
        if found != allowed or isinstance(found, bool) != isinstance(allowed, bool):
            raise ValueError(f"{key} must be {allowed!r}; got {found!r}: {why}")
