"""AxialDiT: a video transformer whose layers attend along one dim each, on one rank or on parts that are switched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from dbsp_megatron.compat import group_rank, group_size, process_groups
from dbsp_megatron.dsp import DspGroup, DspMesh, DspRun, DspSession
from dbsp_megatron.dsp.session import BEGIN, call_beliefs
from dbsp_megatron.models.axial.config import AxialConfig
from dbsp_megatron.models.axial.layer import AxialConditioning, axial_block_spec, axial_stages, stream_pattern
from dbsp_megatron.models.axial.positions import space_features, time_features
from dbsp_megatron.models.axial.sparse import SparseAttention
from dbsp_megatron.models.dit.attention import CoreAttention
from dbsp_megatron.models.dit.embeddings import TimestepEmbedding
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.models.dit.rope import rotary_angles
from dbsp_megatron.models.dit.rows import gather_rows, scatter_rows
from dbsp_megatron.models.dit.tokens import Grid, LocalTokens
from dbsp_megatron.parallel_state import host_group

if TYPE_CHECKING:
    from dbsp_megatron.strategy import SequenceParallel


class AxialDiT(VideoDiT):
    """Predicts a tensor per video patch, as `VideoDiT` does, by attention along one dim in each layer.

    With a mesh, a rank holds the part of the video that `local_positions` names; the stream is switched between layers
    as the stage planner says, and the prediction comes back for the same part. Where every switch would leave ranks
    idle (images, fewer frames than ranks), the stream stays and attention is computed in (frame, head) units. A loss
    summed over local tokens gives parameter gradients that are to be summed over the ranks.

    Tensor-parallel ranks share the heads and matrices as those of `VideoDiT` do. They have one place on the mesh: each
    switches the whole stream, and attends in units of its own heads, among ranks with the same place as itself.

    Args:
        config: The model description.
        sp: Of strategy dsp: the ranks that share a video, where `mesh` is not given; None for one rank.
        mesh: The ranks that share a video, with several axes if it has.
        pg_collection: As in `VideoDiT`; pipeline parallelism is refused.
        core_attention: Replaces dense attention along dim 0 of [s, b, h, d]; there are no units then.
        sequence_parallel: As in `VideoDiT`; tokens are put together where the stream is switched.

    Attributes:
        session: Stages and plans, for `dsp.explain`; None on one rank.

    Raises:
        ValueError: Pipeline parallelism is asked for, heads or channels cannot be split over the tensor-parallel
            ranks, or `sp` is of another strategy; on every rank: tensor-parallel ranks have other places on the mesh.
    """

    described_by = AxialConfig
    dit_config: AxialConfig

    def __init__(
        self,
        config: AxialConfig,
        *,
        sp: SequenceParallel | None = None,
        mesh: DspMesh | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        core_attention: CoreAttention | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        if sp is not None and sp.size > 1 and sp.config.strategy != "dsp":
            raise ValueError(
                f"sp.strategy must be dsp for a model with attention_dims {config.attention_dims}, whose layers have "
                f"no sequence to split; got {sp.config.strategy}"
            )
        groups = process_groups(pg_collection)
        if (pp_size := group_size(getattr(groups, "pp", None))) > 1:
            raise ValueError(f"a model with attention_dims must not be split over pp ranks; got {pp_size}: use 1")
        super().__init__(
            config,
            sp=sp,
            pg_collection=groups,
            core_attention=core_attention,
            sequence_parallel=sequence_parallel,
        )
        self._tp_rank, self._tp_size = group_rank(self.tp_group), group_size(self.tp_group)
        # They must refuse what one of them is given, too: each waits for the others in every layer.
        self._copies = (
            DspGroup(self.tp_group, "tensor-parallel", control_group=host_group(self.tp_group))
            if self._tp_size > 1
            else None
        )
        if mesh is None and sp is not None and sp.size > 1:
            mesh = DspMesh(DspGroup(sp.group, "dsp", control_group=sp.groups.control_group))
        self.session: DspSession | None = None
        if mesh is not None:
            # An attention of the caller's may be made for the heads of the model alone.
            stages = axial_stages(config, in_units=core_attention is None, tp_size=self._tp_size)
            self.session = DspSession(mesh, config.grid_dims, stages=stages, copies=self._copies)
        self.fps_embed: TimestepEmbedding | None = None
        if config.fps is not None:
            self.fps_embed = TimestepEmbedding(config, self.config.params_dtype)
            self.fps_embed.scale = 1.0
            self.reset_parameters()
        self._masks: dict[tuple[object, ...], str | None] = {}
        self._tables: dict[tuple[object, ...], LocalTokens] = {}

    def _layer_specs(
        self, core_attention: CoreAttention | None, sp: SequenceParallel | None
    ) -> TransformerBlockSubmodules:
        return axial_block_spec(self.dit_config, core_attention)

    @torch.compiler.disable
    def local_positions(self, grid: Grid) -> Tensor:
        """Ids of the tokens of this rank in the whole video, int64 [s_local] on the CPU; equal grids give equal parts.

        Raises:
            ValueError: No plan exists for this grid.
        """
        lengths = self.dit_config.lengths(grid)
        plan = None if self.session is None else self.session.plan(lengths)
        ids = torch.zeros((), dtype=torch.int64)
        for dim, length in enumerate(lengths.values()):
            here = range(length)
            if plan is not None and self.session is not None:
                here = plan.start.positions(dim, self.session.mesh.coords)
            ids = ids[..., None] * length + torch.arange(here.start, here.stop)
        return ids.flatten()

    @torch.compiler.disable
    def _along(self, length: int, rotates: bool, device: torch.device) -> LocalTokens:
        """All places along a dim."""
        key = (length, rotates, device)
        if key not in self._tables:
            if len(self._tables) >= 16:
                self._tables.clear()
            channels = self.dit_config.heads_dim if rotates else 0
            # Tables made under inference_mode could not be used by a later training step.
            with torch.inference_mode(False), torch.no_grad():
                places, none = torch.arange(length, device=device), torch.arange(0, device=device)
                cos, sin = rotary_angles(places, (length, 1, 1), (channels, 0, 0), self.dit_config.rope_theta)
            self._tables[key] = LocalTokens(
                num_text=0,
                num_video=length,
                text_positions=none,
                cos=cos[:, None, None, :],
                sin=sin[:, None, None, :],
                text_first=None,
                original=None,
            )
        return self._tables[key]

    @torch.compiler.disable
    def _problem(
        self,
        video_tokens: Tensor,
        timestep: Tensor,
        grid: Grid,
        context: Tensor | None,
        fps: Tensor | None,
        sparse: SparseAttention | None,
    ) -> str | None:
        """What is wrong with the arguments of this rank."""
        try:
            if len(grid) != 3 or not all(isinstance(n, int) and n >= 1 for n in grid):
                raise ValueError(f"grid must be three integers >= 1 (frames, rows, columns); got {grid!r}")
            if sparse is not None and not isinstance(sparse, SparseAttention):
                raise ValueError(f"sparse must be a SparseAttention or None; got {type(sparse).__name__}")
            for name, x in (("video_tokens", video_tokens), ("timestep", timestep), ("context", context), ("fps", fps)):
                if not isinstance(x, Tensor) and (x is not None or name in ("video_tokens", "timestep")):
                    raise ValueError(f"{name} must be a tensor; got {type(x).__name__}")
            positions = self.local_positions(grid)
            tokens = LocalTokens(
                num_text=0,
                num_video=positions.numel(),
                text_positions=positions[:0],
                cos=positions,
                sin=positions,
                text_first=None,
                original=None,
            )
            self._check_inputs(video_tokens, timestep, context, None, tokens)
            if fps is not None and (self.fps_embed is None or fps.shape != timestep.shape):
                raise ValueError(
                    f"fps must be of shape {list(timestep.shape)}, and only given to a model with fps; got "
                    f"{list(fps.shape)} with fps: {self.dit_config.fps}"
                )
        except (TypeError, ValueError) as error:  # No length at all is wrong in another way than a wrong one.
            return str(error)
        return None if sparse is None else self._problem_of(sparse, tuple(self.dit_config.lengths(grid).values()))

    def _problem_of(self, sparse: SparseAttention, lengths: tuple[int, ...]) -> str | None:
        """What is wrong with masks of this rank's heads, found once for a method and lengths."""
        key = (sparse.method.describe(), sparse.block_size, sparse.engine, lengths)
        if key not in self._masks:
            if len(self._masks) >= 64:
                self._masks.clear()
            dit, mine = self.dit_config, sparse.of_heads(self._tp_rank, self._tp_size)
            heads, kv_heads = dit.num_heads // self._tp_size, dit.kv_heads // self._tp_size
            self._masks[key] = mine.problem(heads, kv_heads, dit.num_layers, lengths)
        return self._masks[key]

    def forward(  # type: ignore[override]
        self,
        video_tokens: Tensor,
        timestep: Tensor,
        *,
        grid: Grid,
        context: Tensor | None = None,
        fps: Tensor | None = None,
        sparse: SparseAttention | None = None,
    ) -> Tensor:
        """Predicts this rank's tokens.

        Args:
            video_tokens: [B, s_local, patch_dim], the tokens `local_positions(grid)` of the video.
            timestep: float [B] in [0, 1].
            grid: Patches along time, height and width of the whole video; 1 frame for an image.
            context: [B, L, text_dim], the whole text on every rank; all of it is attended to.
            fps: float [B], frames per second, for a model that is told; None takes `config.fps`.
            sparse: Which blocks are computed along long dims; None for all. Masks of all heads of the model: each
                tensor-parallel rank takes those of its own.

        Returns:
            [B, s_local, patch_out_dim], for the same tokens.

        Raises:
            ValueError: On every rank: the shapes do not fit together, or ranks call with different ones.
        """
        problem = self._problem(video_tokens, timestep, grid, context, fps, sparse)
        lengths: Mapping[str, int] = {}
        sizes: dict[str, int] = {}
        facts: dict[str, object] = {}
        if problem is None:
            lengths, sizes = self.dit_config.lengths(grid), {"B": len(timestep)}
            sizes |= {} if context is None else {"L": context.shape[1]}
            facts = {"dtype": video_tokens.dtype, "fps": fps is not None, "sparse": sparse and sparse.describe()}
            sparse = None if sparse is None else sparse.of_heads(self._tp_rank, self._tp_size)
        if self.session is None:
            self._begin_whole(lengths, sizes, problem, facts)
            return self._predict(None, video_tokens, timestep, grid, context, fps, sparse)
        with self.session.run(lengths, sizes, problem=problem, facts=facts) as run:
            return self._predict(run, video_tokens, timestep, grid, context, fps, sparse)

    @torch.compiler.disable
    def _begin_whole(
        self, lengths: Mapping[str, int], sizes: Mapping[str, int], problem: str | None, facts: Mapping[str, object]
    ) -> None:
        """`DspSession.run` where no rank shares a video with this one."""
        if self._copies is not None:
            self._copies.agree(BEGIN, problem, call_beliefs(lengths, sizes, facts), always=True)
        elif problem is not None:
            raise ValueError(problem)

    def _predict(
        self,
        run: DspRun | None,
        video_tokens: Tensor,
        timestep: Tensor,
        grid: Grid,
        context: Tensor | None,
        fps: Tensor | None,
        sparse: SparseAttention | None,
    ) -> Tensor:
        dit, device = self.dit_config, video_tokens.device
        time_embedding = self.time_embed(timestep)
        if self.fps_embed is not None:
            given = torch.full_like(timestep, dit.fps or 0.0) if fps is None else fps.to(timestep)
            time_embedding = time_embedding + self.fps_embed(given)
        lengths = dit.lengths(grid)
        along = {dim: self._along(length, dim in dit.rope_dims, device) for dim, length in lengths.items()}
        first = along[dit.attention_dim(0)]
        plain = self._conditioning(time_embedding, context, first, first)
        frames = None
        if dit.time_positions and grid[0] > 1:
            frames = time_features(torch.arange(grid[0], device=device), dit.hidden_size, dit.time_positions_scale)
        conditioning = AxialConditioning(
            **{name: getattr(plain, name) for name in ("tokens", "rows", "embedding", "table", "context")},
            run=run,
            lengths=lengths,
            along=along,
            time_features=frames,
            sparse=sparse,
            row_group=None if self._row_positions is None else self.tp_group,
        )
        x = self.block(self._embedded(video_tokens, grid), conditioning)
        if self.output is None:
            raise ValueError("an axial model has no pipeline stages")
        if self._row_positions is not None:
            here = lengths.values() if run is None else [run.local(dim) for dim in lengths]
            x = gather_rows(x, math.prod(here), self.tp_group)
        x = self.output(x, time_embedding)
        if run is not None:
            x = run.home(x, stream_pattern(lengths))
        return x.transpose(0, 1).contiguous()

    def _embedded(self, video_tokens: Tensor, grid: Grid) -> Tensor:
        """Hidden states [s_local, b, hidden] that enter the layers."""
        dit, (_, height, width) = self.dit_config, grid
        if self.patch_embed is None:
            raise ValueError("an axial model has no pipeline stages")
        x: Tensor = self.patch_embed(video_tokens).transpose(0, 1)
        if dit.space_positions != "none":
            places = self.local_positions(grid).to(video_tokens.device) % (height * width)
            rows = torch.div(places, width, rounding_mode="floor")
            x = (
                x
                + space_features(
                    rows, places % width, (height, width), dit.hidden_size, dit.space_positions, dit.space_base
                ).to(x.dtype)[:, None]
            )
        if self._row_positions is not None:
            x = scatter_rows(x, self.tp_group)
        return x.contiguous()
