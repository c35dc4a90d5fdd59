"""DspSession: what a model computes and the plans for it, kept by the lengths of its grid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from dbsp_megatron.comm.agree import Belief, digest_int
from dbsp_megatron.dsp.group import DspGroup
from dbsp_megatron.dsp.layout import Layout
from dbsp_megatron.dsp.mesh import DspMesh
from dbsp_megatron.dsp.planner import cheapest_moves, plan_stages
from dbsp_megatron.dsp.run import DspRun
from dbsp_megatron.dsp.stages import Stage, StagePlan, SwitchStep
from dbsp_megatron.dsp.unit_plan import UnitHistory

BEGIN = "dsp: begin of a pass"
_MAX_PLANS = 64


class DspSession:
    """Plans for a model.

    Stages are declared, or recorded in the first pass, which switches when it has to without knowing what comes.

    Args:
        mesh: the axes.
        grid: names of the sequence dims, such as ("T", "S").
        stages: what a pass computes, in order; None records them.
        cut: names of the dims that may be cut; all of the grid if None.
        check_stages: let ranks compare name, layout and dtype at every stage, for debugging.
        copies: ranks that hold the same part of everything that is cut, such as tensor-parallel ones: they must be told
            the same, or those that go on would wait for the others. The constructor is collective then.

    Attributes:
        unit_history: where attention in units of a mask was computed last, by stage.

    Raises:
        ValueError: on every rank: copies have other places on the mesh.
    """

    def __init__(
        self,
        mesh: DspMesh,
        grid: Sequence[str],
        *,
        stages: Sequence[Stage] | None = None,
        cut: Sequence[str] | None = None,
        check_stages: bool = False,
        copies: DspGroup | None = None,
    ) -> None:
        self.mesh, self.grid, self.check_stages, self._copies = mesh, tuple(grid), check_stages, copies
        self.cut = self.grid if cut is None else tuple(cut)
        self.stages = None if stages is None else tuple(stages)
        self._plans: OrderedDict[tuple[int, ...], StagePlan] = OrderedDict()
        self.unit_history: UnitHistory = OrderedDict()
        self._moves: dict[tuple[Layout, Layout], tuple[SwitchStep, ...]] = {}
        if copies is not None:
            self._check_copies(copies)

    @property
    def cut_dims(self) -> list[int]:
        """Numbers of the grid dims that may be cut."""
        return [index for index, name in enumerate(self.grid) if name in self.cut]

    @property
    def last_plan(self) -> StagePlan | None:
        """The plan that was asked for last; None before the first one."""
        return next(reversed(self._plans.values()), None)

    @torch.compiler.disable
    def plan(self, lengths: Mapping[str, int]) -> StagePlan | None:
        """The plan for these whole lengths of the grid; None before stages are known.

        Raises:
            ValueError: no layout fits, see `plan_stages`.
        """
        if self.stages is None:
            return None
        key = tuple(lengths[name] for name in self.grid)
        if key not in self._plans:
            shape = dict(zip(self.grid, key, strict=True))
            self._plans[key] = plan_stages(self.stages, shape, self.mesh.links, cut=self.cut)
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def moves(self, start: Layout, target: Layout) -> tuple[SwitchStep, ...]:
        """The cheapest switches between two layouts of the grid."""
        if (start, target) not in self._moves:
            if len(self._moves) >= _MAX_PLANS**2:
                self._moves.clear()
            links = self.mesh.links
            self._moves[start, target] = cheapest_moves(start, lambda layout: layout == target, links, self.cut_dims)
        return self._moves[start, target]

    def set_stages(self, stages: Sequence[Stage]) -> None:
        """Replace what a pass computes; plans are made anew."""
        self.stages = tuple(stages)
        self._plans.clear()

    def forget(self) -> None:
        """Record the stages anew in the next pass."""
        self.stages = None
        self._plans.clear()

    @torch.compiler.disable
    def run(
        self,
        lengths: Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
        *,
        problem: str | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> DspRun:
        """Begin a pass: `with session.run({"T": 16, "S": 1024}) as run:`. One gather of a few host integers.

        Args:
            lengths: whole length of every grid dim.
            sizes: lengths of other dims that share a dim in a pattern, such as B in "(B T) S C"; those of tensors that
                enter are known without.
            problem: an error of the caller on this rank, which all ranks raise in place of the pass.
            facts: what else must be equal on all ranks, such as the dtype, as values that print alike.

        Raises:
            ValueError: on every rank: lengths or stages do not fit, a rank has a problem, or ranks differ.
        """
        plan = None
        if problem is None and set(lengths) != set(self.grid):
            problem = f"dsp: lengths must name the grid {list(self.grid)}, got {dict(lengths)}: name each dim"
        elif problem is None and not all(type(length) is int and length >= 0 for length in lengths.values()):
            problem = f"dsp: lengths must be integers >= 0, got {dict(lengths)}: pass those of the whole"
        elif problem is None:
            try:
                plan = self.plan(lengths)
            except ValueError as error:
                problem = str(error)
        stages = [] if plan is None else list(plan.by_name)
        planned = Belief(
            0 if plan is None else plan.digest,
            lambda: f"{len(stages)} stages {', '.join(stages[:4])} ..." if stages else "none recorded yet",
            "declare the same stages on all ranks, or call session.forget() on all of them",
        )
        beliefs = call_beliefs(lengths, sizes or {}, facts or {})
        self._agree(problem, {"lengths": beliefs["lengths"], "stages": planned, "the call": beliefs["the call"]})
        return DspRun(self, plan, {name: lengths[name] for name in self.grid}, dict(sizes or {}))

    def _agree(self, problem: str | None, beliefs: Mapping[str, Belief]) -> None:
        """All ranks of the mesh, and their copies, have no problem and believe the same, or all of them raise."""
        rounds = [partial(self.mesh.agree, beliefs=beliefs)]
        if self._copies is not None:
            rounds.append(partial(self._copies.agree, beliefs=beliefs, always=True))
        _raise_together(BEGIN, problem, rounds)

    def _check_copies(self, copies: DspGroup) -> None:
        """Ranks of the mesh have one number among their copies, and copies one place on the mesh; collective."""
        number, place = copies.rank, list(self.mesh.coords.values())
        numbers = Belief(number, lambda: f"number {number}", "make the mesh of ranks with one number among copies")
        places = Belief(digest_int(place), lambda: f"place {place}", "make copies of ranks with one place on the mesh")
        rounds = [
            partial(self.mesh.agree, beliefs={"their number among copies": numbers}),
            partial(copies.agree, beliefs={"their place on the mesh": places}, always=True),
            # Others on the mesh have to learn what was found among copies.
            partial(self.mesh.agree, beliefs={}),
        ]
        _raise_together("dsp: groups of a session", None, rounds)


def _raise_together(where: str, problem: str | None, rounds: Sequence[Callable[[str, str | None], None]]) -> None:
    """Every group is asked even after an error, so that the ranks of later ones learn of it."""
    for agree in rounds:
        try:
            agree(where, problem)
        except ValueError as error:
            problem = str(error)
    if problem:
        raise ValueError(problem)


def call_beliefs(
    lengths: Mapping[str, int], sizes: Mapping[str, int], facts: Mapping[str, object]
) -> dict[str, Belief]:
    """What ranks compare when a pass begins, see `DspSession.run`.

    Args:
        lengths: whole length of every grid dim.
        sizes: lengths of other dims.
        facts: what else must be equal on all ranks.
    """
    whole = f"{dict(sorted(lengths.items()))}, sizes {dict(sorted(sizes.items()))}"
    # Of all devices: ranks that compute in other dtypes would send other sizes.
    casts = [torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    known = {"gradients": torch.is_grad_enabled(), "autocast": casts, **facts}
    told = ", ".join(f"{name}: {value}" for name, value in known.items())
    return {
        "lengths": Belief(digest_int(whole), lambda: whole, "pass the lengths of one sample to all ranks"),
        "the call": Belief(digest_int(told), lambda: told, "call the model with the same options on all ranks"),
    }
