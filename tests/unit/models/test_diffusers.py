"""parallelize in one process: what it leaves behind, what it refuses, and how it counts steps and masks text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import MaskMethod, SlidingTileMask, TopPMask
from dbsp_megatron.models.diffusers import SUPPORTED, DenseTextMask, parallelize
from dbsp_megatron.models.diffusers.steps import StepCounter
from tests.distributed.diffusers_models import MODELS, make_inputs, make_model
from tests.reference import max_error, random_qkv

needs_diffusers = pytest.mark.diffusers
BLOCK = 4


@pytest.fixture
def sp() -> SequenceParallel:
    return SequenceParallel(SequenceParallelConfig(strategy="none", block_size=BLOCK))


def _hooks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    return {name: tuple(len(getattr(x, kind)) for kind in kinds) for name, x in model.named_modules()}


def _traces(model: Any) -> tuple[Any, ...]:
    """Everything that parallelize touches."""
    processors = {path: id(processor) for path, processor in model.attn_processors.items()}
    forwards = {name: x.__dict__.get("forward") for name, x in model.named_modules()}
    return processors, _hooks(model), forwards, sorted(model.__dict__)


@needs_diffusers
@pytest.mark.parametrize("name", MODELS)
def test_undo_leaves_the_transformer_as_it_was(name: str, sp: SequenceParallel) -> None:
    model = make_model(name)
    inputs = make_inputs(name, model)
    with torch.no_grad():
        want, before = model(**inputs).sample, _traces(model)
        state = {key: x.clone() for key, x in model.state_dict().items()}
        handle = parallelize(model, sp)
        assert _traces(model) != before
        assert max_error(model(**inputs).sample, want) < 1e-4
        handle.undo()
        handle.undo()
        assert _traces(model) == before
        assert torch.equal(model(**inputs).sample, want)
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


@needs_diffusers
def test_undo_after_an_exception_in_a_block(sp: SequenceParallel) -> None:
    model = make_model("wan")
    inputs, before = make_inputs("wan", model), _traces(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with torch.no_grad():
        want = model(**inputs).sample
        with parallelize(model, sp):
            hook = model.blocks[1].ffn.register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                model(**inputs)
            hook.remove()
            # And it can go on.
            assert max_error(model(**inputs).sample, want) < 1e-4
        with pytest.raises(KeyError), parallelize(model, sp):
            raise KeyError("in the user's code")
        assert _traces(model) == before
        assert torch.equal(model(**inputs).sample, want)


@needs_diffusers
def test_undo_keeps_processors_that_were_set_meanwhile(sp: SequenceParallel) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model = make_model("wan")
    handle, other = parallelize(model, sp), WanAttnProcessor()
    model.blocks[0].attn1.set_processor(other)
    handle.undo()
    assert model.blocks[0].attn1.processor is other
    assert type(model.blocks[1].attn1.processor) is WanAttnProcessor


@needs_diffusers
def test_parallelize_runs_positional_arguments_tuples_and_inference_mode(sp: SequenceParallel) -> None:
    """What is kept from inference mode must serve gradients later."""
    model = make_model("wan")
    inputs = make_inputs("wan", model)
    with parallelize(model, sp, mask=TopPMask(0.5)):
        with torch.inference_mode():
            (first,) = model(*inputs.values(), return_dict=False)
        out = model(**inputs).sample
        out.sum().backward()
    assert torch.equal(first, out)
    assert model.patch_embedding.weight.grad is not None


@needs_diffusers
def test_parallelize_runs_fused_projections(sp: SequenceParallel) -> None:
    for name in ("wan", "cogvideox", "flux"):
        model = make_model(name)
        inputs = make_inputs(name, model)
        model.fuse_qkv_projections()
        with torch.no_grad():
            want = model(**inputs).sample
            with parallelize(model, sp):
                assert max_error(model(**inputs).sample, want) < 1e-4


@needs_diffusers
def test_parallelize_refuses_what_it_cannot_honour(sp: SequenceParallel) -> None:
    from diffusers import AutoencoderKL
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    for wrong, says in (
        (nn.Linear(2, 2), "cannot parallelize a Linear"),
        (SimpleNamespace(unet=nn.Linear(2, 2)), "has no transformer"),
        (AutoencoderKL(block_out_channels=(32,), norm_num_groups=32), "supported are WanTransformer3DModel"),
        (torch.compile(make_model("wan")), "_orig_mod"),
    ):
        with pytest.raises(ValueError, match=says):
            parallelize(wrong, sp)
    model = make_model("flux")
    model.transformer_blocks[0].attn.set_processor(FluxIPAdapterAttnProcessor(48, 16))
    with pytest.raises(ValueError, match="FluxIPAdapterAttnProcessor.*unload IP adapters"):
        parallelize(model, sp)
    model = make_model("wan")
    for mask in ("dense", torch.ones(3, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="mask must be a BlockMask"):
            parallelize(model, sp, mask=mask)
    with pytest.raises(ValueError, match="sp must be a SequenceParallel"):
        parallelize(model, None)
    with parallelize(model, sp), pytest.raises(ValueError, match="is parallel already"):
        parallelize(model, sp)
    assert not any(any(counts) for counts in _hooks(model).values())


@needs_diffusers
def test_calls_refuse_what_was_done_since(sp: SequenceParallel) -> None:
    """A processor, cache or compilation that came later would silently attend to one rank's tokens (Traps B35, B37)."""
    from diffusers import FirstBlockCacheConfig, MagCacheConfig
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model = make_model("wan")
    inputs = make_inputs("wan", model)

    def refusal() -> str:
        with pytest.raises(ValueError, match="."), torch.no_grad():
            model(**inputs)
        with pytest.raises(ValueError, match=".") as caught, torch.no_grad():
            model(**inputs)
        return str(caught.value)

    with parallelize(model, sp):
        model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
        assert "fbc_leader_block_hook" in refusal()
        model.disable_cache()
        model.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=2))
        assert "Calibrate without parallelize" in refusal()
        model.disable_cache()
        model.compile(backend="eager")
        assert "compiled as a whole" in refusal()
        model._compiled_call_impl = None
        model.enable_gradient_checkpointing()
        with pytest.raises(ValueError, match="disable_gradient_checkpointing"):
            model(**inputs)
        with torch.no_grad():
            model(**inputs)
        model.set_attn_processor(WanAttnProcessor())
        assert "layer 0 of WanTransformer3DModel was given the processor WanAttnProcessor" in refusal()


@needs_diffusers
def test_compiled_blocks_are_cut_at_attention(sp: SequenceParallel) -> None:
    model = make_model("hunyuan", num_layers=1, num_single_layers=1)
    inputs = make_inputs("hunyuan", model)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        want = model(**inputs).sample
        with parallelize(model, sp):
            for block in (*model.transformer_blocks, *model.single_transformer_blocks):
                block.compile(backend=backend)
            assert max_error(model(**inputs).sample, want) < 1e-4
    # Before and after attention in both.
    assert len(graphs) >= 4


@needs_diffusers
def test_parallelize_runs_layerwise_casting(sp: SequenceParallel) -> None:
    model = make_model("flux")
    inputs = make_inputs("flux", model)
    model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    with torch.no_grad():
        want = model(**inputs).sample
        with parallelize(model, sp):
            assert max_error(model(**inputs).sample, want) < 1e-4


@needs_diffusers
@pytest.mark.parametrize("name", ["wan", "cogvideox", "hunyuan", "flux"])
def test_parallelize_runs_bfloat16(name: str, sp: SequenceParallel) -> None:
    """No further from fp32 than the stock processors are."""
    model = make_model(name)
    inputs = make_inputs(name, model)
    with torch.no_grad():
        exact = model(**inputs).sample
        model.to(torch.bfloat16)
        half = {
            key: x.bfloat16() if key != "timestep" and isinstance(x, torch.Tensor) else x for key, x in inputs.items()
        }
        stock = model(**half).sample
        with parallelize(model, sp):
            ours = model(**half).sample
    assert ours.dtype == stock.dtype == torch.bfloat16
    assert max_error(ours, exact) < 1.5 * max_error(stock, exact)


@needs_diffusers
def test_calls_refuse_attention_masks_and_unfit_block_masks(sp: SequenceParallel) -> None:
    model = make_model("cogvideox")
    inputs = make_inputs("cogvideox", model)
    with torch.no_grad(), parallelize(model, sp):
        mask = torch.ones(2, 52, dtype=torch.bool)
        with pytest.raises(ValueError, match="dense masks are not supported .* never ignored"):
            model(**inputs, attention_kwargs={"attention_mask": mask})
    for heads, seqlen in ((3, 45), (2, 52)):
        with (
            torch.no_grad(),
            parallelize(model, sp, mask=BlockMask.dense(heads, seqlen, block_size_q=BLOCK, block_size_k=BLOCK)),
            pytest.raises(ValueError, match="52 tokens .7 of text in front of 45. and 3 heads"),
        ):
            model(**inputs)


@needs_diffusers
def test_hunyuan_refuses_prompts_of_unequal_length(sp: SequenceParallel) -> None:
    model = make_model("hunyuan")
    inputs = make_inputs("hunyuan", model)
    inputs["encoder_attention_mask"][1, 4:] = 0
    with (
        torch.no_grad(),
        parallelize(model, sp),
        pytest.raises(ValueError, match=r"\[5.0, 4.0\].*once for each prompt"),
    ):
        model(**inputs)


@needs_diffusers
def test_block_mask_gets_dense_text(sp: SequenceParallel) -> None:
    """Nothing but text is attended: rows of video see text, rows of text see everything."""
    model = make_model("cogvideox")
    inputs = make_inputs("cogvideox", model)
    blocks = torch.zeros(1, 3, 13, 13, dtype=torch.bool)
    mask = BlockMask(blocks, BLOCK, BLOCK, 52, 52)
    with torch.no_grad(), parallelize(model, sp, mask=mask):
        model(**inputs)
    seen, _ = sp.layer_mask(1)
    assert seen[:, :2].all()
    assert seen[:, :, :2].all()
    assert not seen[:, 2:, 2:].any()
    assert not blocks.any()


class _Seen(TopPMask):
    """Remembers the grids that it was given."""

    grids: list[Any] = []  # noqa: RUF012

    def predict(self, q_summary: Any, k_summary: Any, layer: int, step: int, grid: Any) -> torch.Tensor:
        _Seen.grids.append((layer, step, grid))
        return super().predict(q_summary, k_summary, layer, step, grid)


@needs_diffusers
@pytest.mark.parametrize(
    ("name", "grid"), [("wan", (3, 5, 3)), ("cogvideox 1.5", (3, 5, 3)), ("hunyuan", (3, 5, 3)), ("flux", (1, 9, 5))]
)
def test_mask_method_is_told_grid_layer_and_step(name: str, grid: Any, sp: SequenceParallel) -> None:
    model = make_model(name)
    inputs = make_inputs(name, model)
    _Seen.grids.clear()
    with torch.no_grad(), parallelize(model, sp, mask=_Seen(0.5)) as handle:
        model(**inputs)
        model(**inputs)
        model(**{**inputs, "timestep": inputs["timestep"] / 2})
        layers = range(handle.num_layers)
    assert [(layer, step, grid) for step in (0, 0, 1) for layer in layers] == _Seen.grids


@needs_diffusers
def test_layout_may_change_between_steps_but_not_under_a_feature_cache(
    sp: SequenceParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import TaylorSeerCacheConfig

    model = make_model("wan")
    inputs = make_inputs("wan", model)
    asked: list[int] = []

    def recalibrate() -> bool:
        asked.append(len(asked))
        return True

    monkeypatch.setattr(sp, "recalibrate", recalibrate)

    def run() -> None:
        for step in range(3):
            model(**{**inputs, "timestep": inputs["timestep"] - step})
            # Another layout from here on, as a ring that learnt would have it.
            sp._layouts.clear()

    with torch.no_grad(), parallelize(model, sp) as handle:
        run()
        assert len(asked) == 3
        model.enable_cache(TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1))
        handle.begin_step(0)
        run()
        (parallel,) = handle._parallel
        assert list(parallel._pinned) == [45]
    assert len(asked) == 3


@needs_diffusers
@pytest.mark.parametrize("shift", [0, -20, 10**6])
def test_flux_ids_that_are_no_grid_have_none(shift: int, sp: SequenceParallel) -> None:
    model = make_model("flux")
    inputs = make_inputs("flux", model)
    inputs["img_ids"] = inputs["img_ids"].flip(0) + shift
    with torch.no_grad():
        want = model(**inputs).sample
        with parallelize(model, sp):
            assert max_error(model(**inputs).sample, want) < 1e-4
        tiles = SlidingTileMask(tile=(1, 3, 3), window=(1, 1, 1))
        with parallelize(model, sp, mask=tiles), pytest.raises(ValueError, match="needs the token grid"):
            model(**inputs)


@needs_diffusers
def test_supported_classes_are_in_diffusers() -> None:
    import diffusers

    assert len(SUPPORTED) == 4
    assert not [name for name in SUPPORTED if not hasattr(diffusers, name)]


def test_dense_text_mask_adds_rows_and_columns_of_blocks_with_text() -> None:
    q, k, _, _ = random_qkv(0, 2, 21, 3, 8)
    inner = TopPMask(0.3)
    got = DenseTextMask(inner, 5).mask(q, k, block_size=4).blocks
    want = inner.mask(q, k, block_size=4).blocks.clone()
    assert not want[:, :, :2].all()
    want[:, :, :2] = True
    want[..., :2] = True
    assert torch.equal(got, want)
    assert torch.equal(DenseTextMask(inner, 0).mask(q, k, block_size=4).blocks, inner.mask(q, k, block_size=4).blocks)


def test_dense_text_mask_passes_on_what_methods_ask_for() -> None:
    inner: MaskMethod = SlidingTileMask(tile=(1, 3, 3), window=(1, 1, 1))
    wrapped = DenseTextMask(inner, 5)
    assert wrapped.needs(0, 0) == inner.needs(0, 0)
    assert wrapped.head_orders(0, 0, 2, 2, 50, (3, 5, 3)) is None
    assert inner.describe() in wrapped.describe()
    assert wrapped.describe() != DenseTextMask(inner, 6).describe()


def test_step_counter_numbers_timesteps(sp: SequenceParallel) -> None:
    counter = StepCounter(sp)

    def steps(values: tuple[float, ...], gradients: bool) -> list[int]:
        found = []
        for value in values:
            counter.see(value, gradients)
            found.append(counter.step)
        return found

    assert steps((1000.0, 1000.0, 750.0, 750.0, 3.5, 1000.0, 2.0), False) == [0, 0, 1, 1, 2, 0, 1]
    # Training draws timesteps at random.
    assert steps((1.0, 900.0, 3.0), True) == [2, 3, 4]
    counter.set(40)
    assert not counter.see(1.0, False)
    assert counter.step == 40
