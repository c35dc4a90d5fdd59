"""Denoising steps, numbered by the timesteps that the transformer is called with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dbsp_megatron.strategy import SequenceParallel


def timestep_value(timestep: Any) -> float | None:
    """The timestep as a number; waits for the device. None if there is none."""
    if isinstance(timestep, Tensor):
        # One for each token: those of given frames are 0.
        return float(timestep.max()) if timestep.numel() else None
    return None if timestep is None else float(timestep)


class StepCounter:
    """Calls with one timestep are one step: both branches of guidance, and whichever of two experts runs.

    The next timestep is the next step. Without gradients, one that is larger starts another run at step 0.

    Args:
        sp: told of each step, so that plans are made once for each layer and step.
    """

    def __init__(self, sp: SequenceParallel) -> None:
        self._sp = sp
        self.step = -1
        self._timestep: float | None = None
        self._by_hand = False

    def set(self, step: int) -> None:
        """The number of the step that comes; timesteps are not looked at from now on."""
        self._by_hand = True
        self._begin(step)

    def see(self, timestep: float | None, gradients: bool) -> bool:
        """Count a call; whether it begins a step."""
        last, self._timestep = self._timestep, timestep
        if self._by_hand or (timestep == last and self.step >= 0):
            return False
        restarts = last is None or (timestep is not None and timestep > last and not gradients)
        self._begin(0 if restarts else self.step + 1)
        return True

    def _begin(self, step: int) -> None:
        self.step = step
        self._sp.begin_step(step)
