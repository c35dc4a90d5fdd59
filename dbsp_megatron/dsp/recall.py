"""Recall: layouts of calls that name no stage, so that a recompute finds those of its forward pass."""

from __future__ import annotations

from dbsp_megatron.compat import in_backward
from dbsp_megatron.dsp.layout import Layout


class Recall:
    """What one pass did where "as the stream is cut now" was meant; in a backward pass "now" has gone by."""

    def __init__(self) -> None:
        # A dict keeps the order, which messages show.
        self._seen: dict[tuple[str, str], dict[Layout, None]] = {}

    def find(self, call: str, key: str, now: Layout) -> Layout:
        """The layout of a call: `now` in a forward pass, in a recompute what it was there.

        Args:
            call: which method.
            key: what tells calls of it apart, such as a pattern.
            now: how the stream is cut.

        Raises:
            ValueError: in a backward pass, if the forward pass made no such call or made it in several layouts; the
                same on all ranks.
        """
        if not in_backward():
            self._seen.setdefault((call, key), {})[now] = None
            return now
        known = list(self._seen.get((call, key), ()))
        if len(known) != 1:
            seen = f"in {len(known)} layouts, {known[0]} and {known[1]} among them" if known else "not at all"
            raise ValueError(
                f"dsp: {call} of {key!r} without a stage is recomputed in the backward pass, and the forward pass made "
                f"it {seen}: name the stage in stage=, or call it outside of what is recomputed"
            )
        return known[0]
