"""How well a fitted kernel rate predicts masks that it was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dbsp_megatron.plan.calibration import KernelRate
from tools.device_timing import TimedLaunch

MAX_MEDIAN_ERROR = 0.5
WARN_ERROR = 0.3


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """How far a rate is off: |predicted / measured - 1|."""

    case: str
    """Kernel and direction."""
    median: float
    """Median of the masks."""
    worst: float
    """Largest of the masks."""

    def __str__(self) -> str:
        return f"{self.case} {self.median:.0%} (worst {self.worst:.0%})"

    @property
    def warning(self) -> str:
        """What to tell the user; empty if every mask is predicted well."""
        if self.worst <= WARN_ERROR:
            return ""
        return (
            f"the {self.case} rate is off by up to {self.worst:.0%} on masks that it was not fitted to (median "
            f"{self.median:.0%}); trust its predictions no further than that, or measure again on an idle machine, "
            "without --quick"
        )


def held_out_error(case: str, rate: KernelRate, timed: Sequence[TimedLaunch], *, accept: bool = False) -> HeldOut:
    """Compares a rate with launches that it was not fitted to.

    Args:
        case: Kernel.
        rate: What was fitted.
        timed: Launches of other masks.
        accept: Take any error.

    Raises:
        ValueError: if the median error is so large that the rate is of little use.
    """
    errors = []
    for launch in timed:
        measured, predicted = launch.us(rate.direction), float(rate.time_us(launch.blocks, launch.rows))
        errors.append(abs(predicted / measured - 1))
    error = HeldOut(case=f"{case} {rate.direction}", median=median(errors), worst=max(errors))
    if error.median > MAX_MEDIAN_ERROR and not accept:
        raise ValueError(
            f"the {error.case} rate is off by {error.median:.0%} (median) and {error.worst:.0%} (worst) on masks that "
            f"it was not fitted to, more than a median of {MAX_MEDIAN_ERROR:.0%}; measure again on an idle machine, "
            "without --quick, with a larger --seqlen or more --repeats, or pass --accept to keep it as it is"
        )
    return error
