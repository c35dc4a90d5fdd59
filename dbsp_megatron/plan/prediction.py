"""Prediction: the expected time of one attention layer, by cause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Microseconds of one attention layer on its critical path; the four parts less `hidden_us` sum to `total_us`."""

    direction: str
    """`forward` or `backward`."""
    ulysses_degree: int
    """Ulysses degree U."""
    ring_degree: int
    """Ring degree R."""
    decoupled: bool
    """Ring steps do not wait for one another (K/V prefetched), instead of once per step."""
    all_to_all_us: float
    """All-to-alls inside the Ulysses groups, there and back, of the slowest rank."""
    exchange_us: float
    """What blocks that another ring rank computes add to them."""
    compute_us: float
    """Kernels of the critical path; the slowest rank of each step, or of the whole ring when decoupled."""
    exposed_us: float
    """Ring communication that no kernel hides."""
    mean_compute_us: float
    """Kernel time of a rank if all were equally loaded and equally fast."""
    hop_us: float
    """Ring communication of one rank, hidden or not; the slowest hop of each step."""
    critical_ulysses_rank: int
    """Ulysses rank whose ring group is the last to finish."""
    critical_ring_rank: int | None
    """Ring rank in that group that is; None when the group waits at every step."""
    num_launches: int
    """Kernel launches of a rank, at most."""
    num_all_to_alls: int
    """All-to-alls of a rank."""
    num_hops: int
    """Ring messages that a rank sends."""
    num_chunks: int = 1
    """Chunks of heads that are exchanged and computed one after another."""
    hidden_us: float = 0.0
    """All-to-alls that run under the kernels of other chunks of heads, less what chunks cost."""
    notes: tuple[str, ...] = ()
    """What was assumed because it was not measured."""

    @property
    def total_us(self) -> float:
        """Time of the layer."""
        return self.all_to_all_us + self.exchange_us + self.compute_us + self.exposed_us - self.hidden_us

    @property
    def total_ns(self) -> int:
        """Time of the layer as a whole number, for comparisons on which ranks must not differ."""
        return round(1000 * self.total_us)

    @property
    def waiting_us(self) -> float:
        """Compute time that perfect balance would save."""
        return max(0.0, self.compute_us - self.mean_compute_us)

    def explain(self) -> str:
        """Says in a few lines what dominates and what would help."""
        total = self.total_us
        moved = self.all_to_all_us + self.exchange_us
        in_the_open = max(0.0, moved - self.hidden_us) / moved if moved else 0.0
        parts = {
            "computing": self.mean_compute_us if self.waiting_us else self.compute_us,
            "waiting for the most loaded rank": self.waiting_us,
            "all-to-all": self.all_to_all_us * in_the_open,
            "exchange of moved blocks": self.exchange_us * in_the_open,
            "ring communication that nothing hides": self.exposed_us,
        }
        advice = {
            "computing": "more ranks or a sparser mask would help, another plan would not",
            "waiting for the most loaded rank": "a better balanced plan or layout would help",
            "all-to-all": "a smaller Ulysses degree, or fewer cut heads, would help",
            "exchange of moved blocks": "a layout that needs fewer moves would help",
            "ring communication that nothing hides": "a smaller Ring degree would help",
        }
        form = "steps decoupled" if self.decoupled else "one wait per step"
        if self.num_chunks > 1:
            form += f", heads in {self.num_chunks} chunks"
        lines = [f"U{self.ulysses_degree}R{self.ring_degree} {self.direction} ({form}): {total:.1f} us"]
        if total > 0:
            top = max(parts, key=lambda name: parts[name])
            shares = ", ".join(f"{name} {value:.1f} us ({value / total:.0%})" for name, value in parts.items() if value)
            where = "" if self.critical_ring_rank is None else f", ring rank {self.critical_ring_rank}"
            lines += [
                f"Parts: {shares}.",
                f"Most of it is {top}: {advice[top]}.",
                f"The ring group of Ulysses rank {self.critical_ulysses_rank}{where} finishes last; "
                f"{self.num_launches} launches, {self.num_all_to_alls} all-to-alls, {self.num_hops} hops a rank "
                f"({self.hop_us:.1f} us of hops, {max(0.0, self.hop_us - self.exposed_us):.1f} us hidden).",
            ]
        lines += [f"Assumed: {note}." for note in self.notes]
        return "\n".join(lines)
