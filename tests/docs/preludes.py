"""What the code of a documentation page takes as given, at sizes that a CPU computes in a second."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_megatron import BlockMask
from tests.reference import random_blocks

SEQLEN, BLOCK, HEADS, DIM = 150, 16, 6, 16


def prelude(page: str) -> dict[str, Any]:
    """Names that exist before the first block of a page: the tensors that its text speaks of."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, SEQLEN, HEADS, DIM, generator=generator) for _ in range(3))
    size = 64 if page == "README.md" else BLOCK
    num = -(-SEQLEN // size)
    blocks = random_blocks(5, 1, HEADS, num, num)
    names: dict[str, Any] = {"S": SEQLEN, "q": q, "k": k, "v": v, "blocks": blocks}
    if page.endswith("planning.md"):
        names["mask"] = BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)
    elif page.endswith("megatron.md"):
        names["x"] = torch.randn(SEQLEN, 1, 32, generator=generator)
    elif page.endswith(("convert.md", "diffusers.md")):
        names.update(_wan(generator))
    return names


def _wan(generator: torch.Generator) -> dict[str, Any]:
    """A Wan transformer of two layers and inputs of 45 tokens."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(1)
    transformer = WanTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_dim=16,
        freq_dim=32,
        ffn_dim=24,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 3, 10, 6, generator=generator),
        "timestep": torch.full((1,), 731),
        "encoder_hidden_states": torch.randn(1, 7, 16, generator=generator),
    }
    return {"transformer": transformer.eval(), "inputs": inputs}
