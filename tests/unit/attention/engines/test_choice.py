"""Choice of an engine: names, the table, the one log line, refusals and fallbacks, with stand-ins for engines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.attention.engines import (
    ENGINES,
    AttentionClass,
    attention_class,
    check_engine,
    choice,
    choose_engine,
    engine_for_tensors,
    engine_named,
)
from dbsp_megatron.attention.engines.torch_reference import TorchEngine

CPU = AttentionClass(
    device=torch.device("cpu"),
    dtype=torch.float32,
    head_dim=64,
    head_dim_v=64,
    block_size_q=128,
    block_size_k=64,
    grouped=False,
    batch_masks=False,
    backward=True,
    deterministic=False,
    resume=False,
)
CUDA = replace(CPU, device=torch.device("cuda", 0), dtype=torch.bfloat16)


class _StandIn(TorchEngine):
    """An engine that refuses what it is told to."""

    description = "a stand-in"

    def __init__(self, name: str, refusal: str | None = None, refuses_tensors: str | None = None) -> None:
        self.name, self._refusal, self._refuses_tensors = name, refusal, refuses_tensors
        self.asked = 0

    def refusal(self, call: AttentionClass) -> str | None:
        self.asked += 1
        return self._refusal

    def refuses_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return self._refuses_tensors


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(choice, "_said", set())
    monkeypatch.setattr(choice, "kernel_path", lambda call: "kernels")
    caplog.set_level(logging.INFO)
    choose_engine.cache_clear()
    yield
    choose_engine.cache_clear()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, _StandIn]:
    """Stand-ins that refuse nothing, and a device of compute capability 9.0."""
    made = {name: _StandIn(name) for name in ENGINES if name != "auto"}
    monkeypatch.setattr(choice, "engine_named", made.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return made


def _prefer(monkeypatch: pytest.MonkeyPatch, *preferences: Any) -> None:
    monkeypatch.setattr(choice, "_PREFERENCES", preferences)


def _lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_check_engine_names_all_engines() -> None:
    for name in ("auto", "torch", "triton", "flash_attn_4", "cudnn", "flex"):
        check_engine(name)
    with pytest.raises(
        ValueError, match="engine must be one of auto, torch, triton, flash_attn_4, cudnn, flex, got 'fa4': use 'auto'"
    ):
        check_engine("fa4")


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "auto"])
def test_engine_named_gives_one_instance_of_every_engine(name: str) -> None:
    engine = engine_named(name)
    assert engine.name == name
    assert engine_named(name) is engine


@pytest.mark.parametrize("name", ["auto", "fa4"])
def test_engine_named_refuses_what_is_no_engine(name: str) -> None:
    with pytest.raises(ValueError, match="engine must be"):
        engine_named(name)


def test_choose_engine_takes_torch_off_cuda(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_engine("auto", CPU) is engine_named("torch")
    assert _lines(caplog) == ["attention engine for fp32 D64 128x64 on cpu: torch (blockwise PyTorch)"]


def test_choose_engine_follows_the_table(engines: dict[str, _StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first entry that fits counts."""
    _prefer(
        monkeypatch,
        choice._Preference(capability=(10, 0), engines=("cudnn",)),
        choice._Preference(head_dims=(96, 128), engines=("flash_attn_4", "triton")),
        choice._Preference(capability=(9, 0), blocks=((128, 64), (64, 64)), engines=("flex", "triton")),
        choice._Preference(engines=("triton",)),
    )
    assert choose_engine("auto", CUDA).name == "flex"
    assert choose_engine("auto", replace(CUDA, head_dim=96)).name == "flash_attn_4"
    assert choose_engine("auto", replace(CUDA, block_size_q=64)).name == "flex"
    assert choose_engine("auto", replace(CUDA, block_size_k=128)).name == "triton"
    assert choose_engine("auto", CPU).name == "torch"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_choose_engine_takes_our_kernels_on_cuda(
    engines: dict[str, _StandIn],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_engine("auto", CUDA).name == "triton"
    assert _lines(caplog) == ["attention engine for bf16 D64 128x64 on cuda: triton (kernels)"]


def test_choose_engine_names_those_that_refuse_in_its_line(
    engines: dict[str, _StandIn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _prefer(monkeypatch, choice._Preference(engines=("cudnn", "flash_attn_4", "triton")))
    engines["cudnn"]._refusal, engines["flash_attn_4"]._refusal = "blocks too long", "it is not installed"
    assert choose_engine("auto", replace(CUDA, head_dim_v=32)).name == "triton"
    assert _lines(caplog) == [
        "attention engine for bf16 D64/32 128x64 on cuda: triton (kernels); not cudnn: blocks too long; not "
        "flash_attn_4: it is not installed"
    ]


def test_choose_engine_falls_back_to_torch(
    engines: dict[str, _StandIn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines["triton"]._refusal = "no fp64"
    assert choose_engine("auto", replace(CUDA, dtype=torch.float64)).name == "torch"
    assert _lines(caplog) == ["attention engine for fp64 D64 128x64 on cuda: torch (a stand-in); not triton: no fp64"]


def test_choose_engine_warns_of_a_slow_call(engines: dict[str, _StandIn], caplog: pytest.LogCaptureFixture) -> None:
    engines["triton"]._refusal = "head dim 68 is odd"
    assert choose_engine("auto", replace(CUDA, head_dim=68, head_dim_v=68)).name == "torch"
    (line,) = _lines(caplog, logging.WARNING)
    assert "not triton: head dim 68 is odd; this is slow: pad the head dim" in line


def test_choose_engine_decides_and_says_once(engines: dict[str, _StandIn], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        choose_engine("auto", CUDA)
    assert engines["triton"].asked == 1
    choose_engine("auto", replace(CUDA, backward=False, resume=True))
    assert len(_lines(caplog)) == 1
    choose_engine("auto", replace(CUDA, head_dim=128, head_dim_v=128))
    assert len(_lines(caplog)) == 2


def test_choose_engine_by_name_is_silent(engines: dict[str, _StandIn], caplog: pytest.LogCaptureFixture) -> None:
    assert choose_engine("flex", CUDA) is engines["flex"]
    assert not _lines(caplog)


def test_choose_engine_by_name_raises_its_refusal_and_a_remedy(engines: dict[str, _StandIn]) -> None:
    engines["cudnn"]._refusal = "blocks too long"
    with pytest.raises(
        ValueError,
        match="engine='cudnn' cannot run bf16 D64 128x64 on cuda: blocks too long; use engine='auto', which takes "
        "triton here",
    ):
        choose_engine("cudnn", CUDA)


def test_engine_for_tensors_falls_back_for_auto_and_says_so_once(
    engines: dict[str, _StandIn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _prefer(monkeypatch, choice._Preference(engines=("flex", "cudnn", "triton")))
    q = torch.zeros(1, 1, 1, 64)
    assert engine_for_tensors("auto", CUDA, q, q, q).name == "flex"
    engines["flex"]._refuses_tensors = "k has stride 2 in its last dim, not 1"
    engines["cudnn"]._refusal = "it is not installed"
    for _ in range(2):
        assert engine_for_tensors("auto", CUDA, q, q, q).name == "triton"
    assert _lines(caplog, logging.WARNING) == [
        "attention engine flex cannot read the tensors of a call (k has stride 2 in its last dim, not 1): triton runs "
        "it, which may be slower; call .contiguous() on it"
    ]
    # Other calls of the class are not changed.
    engines["flex"]._refuses_tensors = None
    assert engine_for_tensors("auto", CUDA, q, q, q).name == "flex"


def test_engine_for_tensors_by_name_raises(engines: dict[str, _StandIn]) -> None:
    engines["triton"]._refuses_tensors = "q has stride 2 in its last dim, not 1"
    q = torch.zeros(1, 1, 1, 64)
    with pytest.raises(ValueError, match="engine='triton' cannot read these tensors: q has stride 2 .*contiguous"):
        engine_for_tensors("triton", CUDA, q, q, q)


def test_attention_class_is_of_no_length() -> None:
    classes = set()
    for seqlen in (5, 9):
        q, k, v = (torch.zeros(2, seqlen, heads, dim) for heads, dim in ((4, 64), (2, 64), (2, 32)))
        classes.add(attention_class(q, k, v, 128, 64, batch_masks=True, backward=False, deterministic=True))
    assert classes == {
        replace(CPU, head_dim_v=32, grouped=True, batch_masks=True, backward=False, deterministic=True, resume=False)
    }
