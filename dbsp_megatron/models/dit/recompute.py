"""Activations that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dbsp_megatron.models.dit.attention import DiTSelfAttention
from dbsp_megatron.models.dit.conditioning import Conditioning

Result = TypeVar("Result")


def recomputed(call: Callable[..., Result], *args: Any) -> Result:
    """Calls now and once more in the backward pass; only `args` are kept.

    Layers draw no random numbers, so there is no state to restore (Megatron's recomputation touches that of CUDA, which
    a CPU run does not have). Without early stop, every rank runs every collective again, however little its own tokens
    need: ranks that stopped at different points would wait for one another for ever.
    """
    with set_checkpoint_early_stop(False):
        result: Result = checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def attention_kept(
    before: Callable[[Tensor, Conditioning], tuple[Tensor, ...]],
    after: Callable[[Tensor, Tensor, Tensor, Conditioning], Tensor],
    attention: DiTSelfAttention,
    hidden_states: Tensor,
    conditioning: Conditioning,
) -> Tensor:
    """A layer that keeps its input and what attention of tokens needs (q, k, v, out and lse), and recomputes the rest.

    Attention over a long sequence takes most of the time and little of the memory, and it is where ranks exchange
    tokens: neither happens a second time.

    Args:
        before: hidden states to q, k, v, the input of the attention, and the gate.
        after: hidden states, result of the attention and gate to the layer's output.
        attention: what computes in between.
        hidden_states: [s_local, b, hidden].
        conditioning: see `Conditioning`.

    Source: selective recomputation of Korthikanti et al. (arXiv:2205.05198), the other way round: they recompute the
        attention core, whose scores they would have to keep; ours keeps no scores.
    """
    q, k, v, attended, gate = recomputed(before, hidden_states, conditioning)
    out = attention.attend(q, k, v, attended, conditioning)
    return recomputed(after, hidden_states, out, gate, conditioning)
