"""Fixtures of the engine tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from dbsp_megatron.attention.engines import cudnn_bsa, flash_attn_4, flex
from dbsp_megatron.attention.engines.external import ExternalEngine
from tests.unit.attention.engines.stand_ins import Libraries, RecordingTorch, SparseTensors


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Libraries]:
    found = Libraries()
    for name in ("flash_attn", "flash_attn.cute", "cutlass", "cutlass.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    interface, sparsity, cudnn = (
        ModuleType(name) for name in ("flash_attn.cute.interface", "flash_attn.cute.block_sparsity", "cudnn")
    )
    interface._flash_attn_fwd, interface._flash_attn_bwd = found.flash_forward, found.flash_backward  # type: ignore[attr-defined]
    sparsity.BlockSparseTensorsTorch = SparseTensors  # type: ignore[attr-defined]
    cudnn.BSA = SimpleNamespace(  # type: ignore[attr-defined]
        block_sparse_attention_forward=found.cudnn_forward, block_sparse_attention_backward=found.cudnn_backward
    )
    for module in (interface, sparsity, cudnn):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flex, "_compiled", lambda: found.flex)
    _forget_libraries()
    yield found
    _forget_libraries()


def _forget_libraries() -> None:
    flash_attn_4._library.cache_clear()
    cudnn_bsa._library.cache_clear()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> RecordingTorch:
    engine = RecordingTorch()
    monkeypatch.setattr(ExternalEngine, "_fallback", lambda self: engine)
    return engine
