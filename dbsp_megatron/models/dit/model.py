"""VideoDiT: a Diffusion Transformer for video whose tokens are split over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from dbsp_megatron.compat import group_rank, group_size, process_groups
from dbsp_megatron.models.dit.attention import CoreAttention
from dbsp_megatron.models.dit.block import DiTBlock
from dbsp_megatron.models.dit.conditioning import Conditioning
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.embeddings import ImageProjection, OutputLayer, TextProjection, TimestepEmbedding
from dbsp_megatron.models.dit.init_weights import init_weights, zero_init
from dbsp_megatron.models.dit.layer_spec import default_core_attention, dit_block_spec, dit_transformer_config
from dbsp_megatron.models.dit.linear import Linear
from dbsp_megatron.models.dit.modulation import AdaLayerNormZero, AffineNorm
from dbsp_megatron.models.dit.positions import PositionEmbedding
from dbsp_megatron.models.dit.rows import RowPositions, gather_rows, scatter_rows
from dbsp_megatron.models.dit.tensor_parallel import sum_gradient
from dbsp_megatron.models.dit.tokens import Grid, LocalTokens, TokenLocator

if TYPE_CHECKING:
    from dbsp_megatron.strategy import SequenceParallel


class VideoDiT(MegatronModule):
    """Predicts a tensor per video patch from noisy patches, a timestep and, optionally, text.

    All layers but the self-attention treat tokens one by one, so each rank computes its own tokens only. A loss summed
    over local tokens gives parameter gradients that are to be summed over the ranks of `sp`.

    Args:
        config: The model description.
        sp: What the self-attention (and its coarse branch) communicates through; None for one rank.
        pg_collection: Megatron's process groups; None takes those of `parallel_state` if it is initialised, else none:
            a single process needs neither `torch.distributed` nor Megatron's groups.
        core_attention: Replaces the self-attention core, for tests and other attention back ends.
        sequence_parallel: Megatron's: between their matrices, tensor-parallel ranks share out the tokens. Gradients of
            parameters marked `sequence_parallel` are then to be summed over them, as `finalize_model_grads` does.
        vp_stage: Megatron's virtual stage, the number of this one among `vp_size` models of a pipeline rank.
        vp_size: Such models; their layers are not consecutive: see `ChunkedDiT`.

    Attributes:
        config: Megatron's `TransformerConfig`.
        dit_config: The model description.

    Raises:
        ValueError: If heads or feed-forward channels cannot be split over the tensor-parallel ranks, or the description
            is of another kind of model.
    """

    described_by: ClassVar[type[DiTConfig]] = DiTConfig

    def __init__(
        self,
        config: DiTConfig,
        *,
        sp: SequenceParallel | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        core_attention: CoreAttention | None = None,
        sequence_parallel: bool = False,
        vp_stage: int = 0,
        vp_size: int = 1,
    ) -> None:
        if type(config) is not self.described_by:
            raise ValueError(
                f"{type(self).__name__} is described by a {self.described_by.__name__}, got {type(config).__name__}: "
                "use models.build.build_model, which takes all"
            )
        groups = process_groups(pg_collection)
        sp_size = 1 if sp is None else sp.size
        super().__init__(
            config=dit_transformer_config(config, groups, sp_size, sequence_parallel=sequence_parallel, vp_size=vp_size)
        )
        self.dit_config = config
        # What Megatron's schedules and gradient reduction ask a model for.
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.pg_collection = groups
        self.tp_group = groups.tp
        dtype = self.config.params_dtype
        self.vp_stage = vp_stage if vp_size > 1 else None  # for Megatron's schedules
        stage = self._stage = vp_stage * group_size(groups.pp) + group_rank(groups.pp)
        num_stages = self._num_stages = vp_size * group_size(groups.pp)
        self.pre_process, self.post_process = stage == 0, stage == num_stages - 1
        self._first_layer = stage * (config.num_attention_layers // num_stages)
        self._input: Tensor | None = None
        self.patch_embed = Linear(config.patch_dim, config.hidden_size, dtype=dtype) if self.pre_process else None
        self.time_embed = TimestepEmbedding(config, dtype)
        self.time_proj: Linear | None = None
        if config.modulation == "table":
            self.time_proj = Linear(config.time_channels, 2 * self._num_streams * 3 * config.hidden_size, dtype=dtype)
            zero_init(self.time_proj)
        # Text in the sequence enters with the video; contexts for cross-attention are needed by every stage.
        has_text_proj = config.text == "cross" or (config.has_joint_text and self.pre_process)
        self.text_proj = TextProjection(config, dtype) if has_text_proj else None
        self.image_proj: ImageProjection | None = None
        if config.image_dim is not None:
            self.image_proj = ImageProjection(self.config, image_dim=config.image_dim, hidden_size=config.hidden_size)
        self.position: PositionEmbedding | None = None
        if config.position_embedding != "none" and self.pre_process:
            self.position = PositionEmbedding(config, dtype)
        self.block = DiTBlock(
            self.config,
            self._own_layers(self._layer_specs(core_attention, sp)),
            recompute=config.recompute,
            pg_collection=groups,
            vp_stage=self.vp_stage,
        )
        self.output = OutputLayer(self.config, dit=config, tp_group=groups.tp) if self.post_process else None
        self._locate = TokenLocator(
            text_len=config.sequence_text_len,
            rope_axes=config.rope_axes_dims,
            rope_theta=config.rope_theta,
            rope_base_grid=config.rope_base_grid,
        )
        self._row_positions = RowPositions(groups.tp) if sequence_parallel else None
        if sequence_parallel:
            self._mark_partial()
        if num_stages > 1:
            self._mark_copies()
        self.reset_parameters()

    def _layer_specs(
        self, core_attention: CoreAttention | None, sp: SequenceParallel | None
    ) -> TransformerBlockSubmodules:
        core = default_core_attention(sp) if core_attention is None else core_attention
        return dit_block_spec(self.dit_config, core, sp)

    def _own_layers(self, spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
        count = self.dit_config.num_attention_layers // self._num_stages
        return TransformerBlockSubmodules(layer_specs=(spec.layer_specs or [])[self._first_layer :][:count])

    def _mark_partial(self) -> None:
        """Marks parameters that each tensor-parallel rank applies to its own rows (biases of row layers are marked)."""
        marked: list[Any] = []
        for module in self.block.modules():
            if isinstance(module, AffineNorm):
                marked += module.parameters()
            if isinstance(module, AdaLayerNormZero) and module.table is not None:
                marked.append(module.table)
        for parameter in marked:
            parameter.sequence_parallel = True

    def _mark_copies(self) -> None:
        """Marks the timestep embedding and projections of cross-attention contexts, of which every stage has a copy."""
        text = self.text_proj if self.dit_config.text == "cross" else None
        copied = (self.time_embed, self.time_proj, text, self.image_proj)
        parameters: list[Any] = [p for module in copied if module is not None for p in module.parameters()]
        for parameter in parameters:
            # Megatron's names: gradients are summed over stages; `shared` keeps copies out of the gradient norm.
            parameter.pipeline_parallel = True
            parameter.shared = not self.pre_process

    def share_copies(self, other: VideoDiT) -> None:
        """Takes another model's instance of everything that each pipeline stage has a copy of."""
        self.time_embed, self.time_proj, self.image_proj = other.time_embed, other.time_proj, other.image_proj
        if self.dit_config.text == "cross":
            self.text_proj = other.text_proj

    def global_name(self, name: str) -> str:
        """Name of a parameter in a model that is not cut into pipeline stages."""
        head, found, rest = name.partition("block.layers.")
        if not found or head or not self._first_layer:
            return name
        number, _, tail = rest.partition(".")
        return f"block.layers.{int(number) + self._first_layer}.{tail}"

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's checkpoint view: of parameters that every pipeline stage has, the first one stores its own."""
        sharded: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, parameter in self.named_parameters():
            if self._stage and getattr(parameter, "pipeline_parallel", False):
                mine = sharded[prefix + name]
                sharded[prefix + name] = replace(mine, replica_id=(self._stage, *mine.replica_id[1:]))
        return sharded

    @property
    def _num_streams(self) -> int:
        return 2 if self.dit_config.has_joint_text else 1

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fills all parameters from a seed, default `config.init_seed`, alike for every split over ranks."""
        named = {self.global_name(name): parameter for name, parameter in self.named_parameters()}
        init_weights(named, self.dit_config.init_seed if seed is None else seed, self.tp_group)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the earlier pipeline stage sent, [s_local, b, hidden], or a list of one; for Megatron's schedules."""
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def _check_inputs(
        self,
        video_tokens: Tensor,
        timestep: Tensor,
        context: Tensor | None,
        image_context: Tensor | None,
        tokens: LocalTokens,
    ) -> None:
        dit, batch = self.dit_config, video_tokens.shape[0]
        expected: tuple[int, ...] = (batch, tokens.num_video, dit.patch_dim)
        if video_tokens.shape != expected:
            raise ValueError(
                "video_tokens must be [B, s_video_local, patch_dim] = "
                f"{list(expected)} for these positions; got {list(video_tokens.shape)}"
            )
        if timestep.shape != (batch,) or not timestep.is_floating_point():
            raise ValueError(
                f"timestep must be floating point of shape [{batch}]; got {timestep.dtype} of {list(timestep.shape)}"
            )
        if (context is None) != (dit.text == "none"):
            raise ValueError(
                f"context must {'not ' if dit.text == 'none' else ''}be given with text: {dit.text}; "
                f"got {'None' if context is None else list(context.shape)}"
            )
        if (image_context is None) != (dit.image_dim is None):
            raise ValueError(
                f"image_context must {'not ' if dit.image_dim is None else ''}be given with image_dim: "
                f"{dit.image_dim}; got {'None' if image_context is None else list(image_context.shape)}"
            )
        if image_context is not None:
            length = image_context.shape[1] if image_context.dim() == 3 else 1
            expected = (batch, length, dit.image_dim or 0)
            if image_context.shape != expected or length < 1:
                raise ValueError(
                    f"image_context must be [B, L, image_dim] = {list(expected)}; got {list(image_context.shape)}"
                )
        if context is None:
            return
        length = dit.text_len if dit.has_joint_text else context.shape[1] if context.dim() == 3 else 1
        expected = (batch, length, dit.text_dim or 0)
        if context.shape != expected or length < 1:
            raise ValueError(f"context must be [B, L, text_dim] = {list(expected)}; got {list(context.shape)}")

    def _conditioning(
        self,
        time_embedding: Tensor,
        context: Tensor | None,
        tokens: LocalTokens,
        rows: LocalTokens,
        image_context: Tensor | None = None,
    ) -> Conditioning:
        table = None
        if self.time_proj is not None:
            table = self.time_proj(F.silu(time_embedding))
            table = table.unflatten(-1, (2, self._num_streams, 3, -1)).permute(1, 2, 3, 0, 4)
            if self._row_positions is not None:
                table = sum_gradient(table, self.tp_group)  # each rank applies it to its own rows
        cross = None
        if self.dit_config.text == "cross" and context is not None and self.text_proj is not None:
            cross = self.text_proj(context).transpose(0, 1)
        image = None
        if image_context is not None and self.image_proj is not None:
            image = self.image_proj(image_context).transpose(0, 1)
        return Conditioning(
            tokens=tokens,
            rows=rows,
            embedding=F.silu(time_embedding),
            table=table,
            context=cross,
            image_context=image,
        )

    def _rows(self, positions: Tensor, grid: Grid, tokens: LocalTokens) -> LocalTokens:
        """Tokens between the matrices of a layer; they matter only where text and video are modulated apart."""
        if self._row_positions is None or self._num_streams == 1:
            return tokens
        return self._locate(self._row_positions(positions), grid)

    def _embed(
        self, video_tokens: Tensor, context: Tensor | None, tokens: LocalTokens, positions: Tensor, grid: Grid
    ) -> Tensor:
        """Hidden states [s_local, b, hidden] that enter the layers of this stage."""
        if self.patch_embed is None:
            if self._input is None:
                raise ValueError("a later pipeline stage needs set_input_tensor() before forward; got no tensor")
            return self._input
        x: Tensor = self.patch_embed(video_tokens.transpose(0, 1))
        if self.dit_config.has_joint_text and context is not None and self.text_proj is not None:
            text = self.text_proj(context.index_select(1, tokens.text_positions)).transpose(0, 1)
            x = tokens.merge(text, x)
        if self.position is not None:
            x = x + self.position(positions, grid).to(x.dtype)
        if self._row_positions is not None:
            x = scatter_rows(x, self.tp_group)
        return x.contiguous()

    def forward(
        self,
        video_tokens: Tensor,
        timestep: Tensor,
        *,
        grid: Grid,
        positions: Tensor,
        context: Tensor | None = None,
        image_context: Tensor | None = None,
    ) -> Tensor:
        """Predicts this rank's video tokens.

        Args:
            video_tokens: [B, s_video_local, patch_dim], the video tokens among `positions`, in that order.
            timestep: float [B] in [0, 1].
            grid: Patches along time, height and width of the whole video.
            positions: int64 [s_local], global ids of this rank's tokens: ids of the sequence `[text ; video]` if the
                text is joint (`text_len` text tokens first), else of the video.
            context: [B, L, text_dim], the whole text on every rank.
            image_context: [B, L, image_dim], all tokens of the image on every rank; with `image_dim` only.

        Returns:
            [B, s_video_local, patch_out_dim]; hidden states [s_local, B, hidden] if later pipeline stages follow.

        Raises:
            ValueError: If the shapes do not fit together, or a learned position embedding is for another grid.
        """
        tokens = self._locate(positions, grid)
        self._check_inputs(video_tokens, timestep, context, image_context, tokens)
        time_embedding = self.time_embed(timestep)
        rows = self._rows(positions, grid, tokens)
        conditioning = self._conditioning(time_embedding, context, tokens, rows, image_context)
        x = self.block(self._embed(video_tokens, context, tokens, positions, grid), conditioning)
        if self.output is None:
            return x
        if self._row_positions is not None:
            x = gather_rows(x, tokens.num_text + tokens.num_video, self.tp_group)
        if self.dit_config.has_joint_text:
            x = tokens.split(x)[1]
        predicted: Tensor = self.output(x, time_embedding).transpose(0, 1)
        return predicted.contiguous()
