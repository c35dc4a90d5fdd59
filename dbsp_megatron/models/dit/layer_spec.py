"""Layer specs of the DiT, and the megatron config that goes with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dbsp_megatron.compat import group_size
from dbsp_megatron.models.dit.attention import CoreAttention, DiTCrossAttention, DiTSelfAttention
from dbsp_megatron.models.dit.coarse import CoarseBranch
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.layers import DiTLayer, DiTLayerSubmodules, SingleStreamLayer
from dbsp_megatron.models.dit.linear import ColumnLinear, RowLinear


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, the activation of all supported models."""
    return F.gelu(x, approximate="tanh")


def dit_transformer_config(
    dit: DiTConfig,
    pg_collection: ProcessGroupCollection,
    sp_size: int,
    *,
    sequence_parallel: bool = False,
    vp_size: int = 1,
) -> TransformerConfig:
    """Megatron's config for a DiT.

    Args:
        dit: The model description.
        pg_collection: Process groups; `tp` may be None.
        sp_size: Ranks that share a sequence.
        sequence_parallel: Megatron's: tensor-parallel ranks share out the tokens between their matrices.
        vp_size: Virtual stages of each pipeline rank.

    Raises:
        ValueError: If heads, channels or layers cannot be split over the ranks.
    """
    tp_size = group_size(pg_collection.tp)
    for name, value in (
        ("num_kv_heads", dit.kv_heads),
        ("num_heads", dit.num_heads),
        ("ffn_hidden_size", dit.ffn_channels),
        ("hidden_size", dit.hidden_size),
    ):
        if value % tp_size:
            raise ValueError(
                f"{name} must be divisible by the tensor-parallel size {tp_size}; got {value}. "
                "Use a smaller tensor-parallel size; sequence parallelism has no such rule"
            )
    pp_size = group_size(getattr(pg_collection, "pp", None))
    if dit.num_attention_layers % (pp_size * vp_size):
        virtual = f" times {vp_size} virtual stages" if vp_size > 1 else ""
        raise ValueError(
            f"num_layers + num_single_layers must be divisible by the pipeline-parallel size {pp_size}{virtual}; got "
            f"{dit.num_attention_layers}. Use a smaller pipeline-parallel size"
        )
    if sequence_parallel and (dit.text == "dual_stream" or dit.coarse_branch):
        what = "text: dual_stream" if dit.text == "dual_stream" else "a coarse branch"
        raise ValueError(
            f"Megatron's sequence_parallel must be off for a model with {what}, whose tensor-parallel ranks would hold "
            "unequal rows; got true. Set it to false: ranks of a sequence (sp.*) are not concerned"
        )
    return TransformerConfig(
        num_layers=dit.num_attention_layers,
        hidden_size=dit.hidden_size,
        ffn_hidden_size=dit.ffn_channels,
        num_attention_heads=dit.num_heads,
        num_query_groups=dit.kv_heads,
        kv_channels=dit.heads_dim,
        layernorm_epsilon=dit.norm_eps,
        activation_func=gelu_tanh,
        add_bias_linear=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp_size,
        context_parallel_size=sp_size,
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=vp_size if vp_size > 1 else None,
        # With two ranks, the next one is the one before, too: batches of messages would be taken for one another.
        overlap_p2p_comm=vp_size > 1,
        batch_p2p_comm=vp_size == 1,
        sequence_parallel=sequence_parallel,
        pipeline_dtype=torch.float32,
        # Ranks of a sequence may hold unequal numbers of tokens, so stages tell one another how many come.
        variable_seq_lengths=pp_size > 1,
        moe_token_dispatcher_type="alltoall",  # there are no experts; the default contradicts variable lengths
        params_dtype=torch.float32,
        # Parameters are made on the default device and filled by `init_weights`, the same for every split.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        # Dual- and single-stream layers have different parameters, so each layer is stored under its own number.
        hetereogenous_dist_checkpoint=True,
    )


def default_core_attention(sp: object | None) -> ModuleSpec:
    """The balanced block-sparse attention over `sp`, as a core_attention spec."""
    from dbsp_megatron.attention.module import DualBalancedAttention

    return ModuleSpec(module=DualBalancedAttention, params={"sp": sp})


def dit_block_spec(
    dit: DiTConfig, core_attention: CoreAttention, sp: object | None = None
) -> TransformerBlockSubmodules:
    """The layers of a DiT.

    Args:
        dit: The model description.
        core_attention: Module class or spec that follows Megatron's core_attention contract.
        sp: What the coarse branch, if the model has one, communicates through; None takes the registered one.
    """
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear))
    dual_stream = dit.text == "dual_stream"
    attention = {"dit": dit, "core_attention": core_attention}
    if dit.coarse_branch:
        attention["coarse_branch"] = ModuleSpec(module=CoarseBranch, params={"dit": dit, "sp": sp})
    layer = ModuleSpec(
        module=DiTLayer,
        params={"dit": dit, "num_streams": 2 if dit.has_joint_text else 1},
        submodules=DiTLayerSubmodules(
            self_attention=ModuleSpec(
                module=DiTSelfAttention,
                params=attention | {"dual_stream": dual_stream},
            ),
            cross_attention=(
                ModuleSpec(module=DiTCrossAttention, params={"dit": dit}) if dit.text == "cross" else None
            ),
            mlp=mlp,
            text_mlp=mlp if dual_stream else None,
        ),
    )
    single = ModuleSpec(
        module=SingleStreamLayer,
        params={"dit": dit},
        submodules=DiTLayerSubmodules(
            self_attention=ModuleSpec(
                module=DiTSelfAttention,
                params=attention | {"output_bias": False},
            ),
            mlp=mlp,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * dit.num_layers + [single] * dit.num_single_layers)
