"""MaskConfig: refusals name the key, the rule and the value; settings reach the method that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from dbsp_megatron import MaskConfig, build_mask_method
from dbsp_megatron.masks import (
    METHODS,
    FileMask,
    MaskMethod,
    ScheduledMask,
    SlidingTileMask,
    SpargeMask,
    write_masks,
)
from dbsp_megatron.masks.config import COMMON, settings_of

SETTINGS: dict[str, Any] = {
    "top_p": 0.4,
    "density": 0.3,
    "min_blocks": 3,
    "similarity": 0.2,
    "sample_rows": 8,
    "tile": (1, 2, 3),
    "window": (3, 1, 5),
    "width": 0.5,
    "sink_frames": 2,
    "global_heads": (1, 2),
    "sink_tokens": 7,
    "window_tokens": 9,
}


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"method": "topk9"}, "method", "topk9"),
        ({"top_p": 0.0}, "top_p", "0.0"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"top_p": float("nan")}, "top_p", "nan"),
        ({"min_blocks": 0}, "min_blocks", "0"),
        ({"dense_layers": -1}, "dense_layers", "-1"),
        ({"dense_steps": -2}, "dense_steps", "-2"),
        ({"cube": (2, 0, 2)}, "cube", "(2, 0, 2)"),
        ({"method": "topk", "density": 2.0}, "density", "2.0"),
        ({"method": "sparge", "similarity": 2.0}, "similarity", "2.0"),
        ({"method": "sliding_tile", "window": (3, 2, 3)}, "window", "(3, 2, 3)"),
        ({"method": "radial", "width": 0.0}, "width", "0.0"),
        ({"method": "duo", "global_heads": (-1,)}, "global_heads", "(-1,)"),
        ({"method": "file"}, "path", "none"),
        ({"method": "paro", "path": ""}, "path", "none"),
    ],
)
def test_mask_config_refuses_values_out_of_range(options: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^mask\.{key}") as error:
        MaskConfig(**options)
    assert value in str(error.value)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", [*SETTINGS, "path"])
def test_settings_of_other_methods_are_refused(method: str, key: str) -> None:
    """A setting without effect would look like one with an effect (Trap B35)."""
    value = SETTINGS.get(key, "masks.safetensors")
    base = {"path": "masks.safetensors"} if "path" in settings_of(method) else {}
    if key in settings_of(method):
        assert getattr(MaskConfig(method=method, **{**base, key: value}), key) == value
        return
    with pytest.raises(ValueError, match=rf"^mask\.{key}=.*does not belong to mask\.method={method}") as error:
        MaskConfig(method=method, **base, **{key: value})
    assert all(name in str(error.value) for name in METHODS if key in settings_of(name))


@pytest.mark.parametrize("method", [name for name in METHODS if "path" not in settings_of(name)])
def test_every_setting_reaches_its_method(method: str) -> None:
    made = build_mask_method(MaskConfig(method=method, **{key: SETTINGS[key] for key in settings_of(method)}))
    assert type(made) is METHODS[method]
    assert all(getattr(made, key) == SETTINGS[key] for key in settings_of(method))
    assert build_mask_method(MaskConfig(method=method)) == METHODS[method]()


def test_settings_cover_every_method() -> None:
    """A method with a setting that MaskConfig lacks could not be configured from a file."""
    keys = {key for name in METHODS for key in settings_of(name)}
    assert keys == {*SETTINGS, "path"}
    assert keys.isdisjoint(COMMON)
    assert set(MaskConfig.__dataclass_fields__) == keys | set(COMMON)


def test_files_are_opened_when_the_method_is_built(tmp_path: Path) -> None:
    path = tmp_path / "masks.safetensors"
    config = MaskConfig(method="file", path=str(path), dense_layers=1)
    with pytest.raises(ValueError, match=rf"^mask\.path={path} must be a file of block masks"):
        build_mask_method(config)
    write_masks(path, {0: torch.ones(2, 3, 3).bool()}, seqlen=24, block_size=8)
    made = build_mask_method(config)
    assert isinstance(made, ScheduledMask)
    assert isinstance(made.inner, FileMask)


def test_lists_from_yaml_become_tuples() -> None:
    config = MaskConfig(method="sliding_tile", tile=[1, 2, 2], window=[3, 3, 3])  # type: ignore[arg-type]
    assert build_mask_method(config) == build_mask_method(
        MaskConfig(method="sliding_tile", tile=(1, 2, 2), window=(3, 3, 3))
    )


def test_descriptions_of_methods_differ() -> None:
    names = [name for name in METHODS if "path" not in settings_of(name)]
    texts = {build_mask_method(MaskConfig(method=name)).describe() for name in names}
    assert len(texts) == len(names)


def test_methods_are_documented_with_their_source() -> None:
    for name, kind in METHODS.items():
        assert issubclass(kind, MaskMethod)
        assert kind.name == name
        if name not in ("dense", "file"):
            assert "arXiv:" in str(kind.__doc__), name


STRANGE: tuple[Any, ...] = (
    *(
        0,
        -1,
        3,
        10**30,
        0.5,
        1.0,
        5e-324,
        1e308,
        float("nan"),
        float("inf"),
        True,
        False,
        "",
        "0.5",
        b"x",
        None,
        object(),
    ),
    *((), [], {}, (1,), (1, 1, 1), [1, 1, 1], (1.0, 1.0, 1.0), (True, True, True), (10**30, 1, 1), (None,), "111"),
    *(((1, 1, 1),), ((1, 1, 1), 3), (3, (1, 1, 1)), [[]], ((),), [["a"]], ((0,), (0,)), (0, 0), np.int64(3)),
)
"""Values of every kind, of which each setting takes a few."""


def _refusal(make: Callable[[], Any]) -> str | None:
    """What a call refuses; any other error than ValueError goes through."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("method", [name for name in METHODS if "path" not in settings_of(name)])
def test_strange_settings_are_refused_or_give_masks(method: str) -> None:
    """Nothing but a ValueError, at once or where heads are known; what is taken leaves no row empty."""
    q = torch.randn(1, 60, 4, 8)
    for key in settings_of(method):
        masks: list[torch.Tensor] = []
        for value in STRANGE:

            def make(key: str = key, value: Any = value, masks: list[torch.Tensor] = masks) -> None:
                masks.append(METHODS[method](**{key: value}).mask(q, q, 2, 1, (3, 4, 5), 8, v=q).blocks)

            refused = _refusal(make)
            assert refused is None or key in refused, (key, value)
        assert 0 < len(masks) < len(STRANGE)
        assert all(bool(blocks.any(-1).all()) for blocks in masks)


@pytest.mark.parametrize("method", METHODS)
def test_strange_configurations_are_refused(method: str) -> None:
    base = {"path": "masks.safetensors"} if "path" in settings_of(method) else {}
    for key in (*COMMON[1:], *settings_of(method)):
        for value in STRANGE:
            refused = _refusal(lambda key=key, value=value: MaskConfig(method=method, **{**base, key: value}))
            # Steps of a ramp that is not named are refused with both.
            wanted = "mask.ramp" if key == "ramp_steps" else f"mask.{key}"
            assert refused is None or refused.startswith(wanted), (key, value, refused)
    for value in STRANGE:
        with pytest.raises(ValueError, match=r"^mask\.method must be one of"):
            MaskConfig(method=value)


def test_configuration_takes_whatever_the_methods_take() -> None:
    """Types that the command line checks: what a method takes in code can be written in a file."""
    known = get_type_hints(MaskConfig)
    for name, kind in METHODS.items():
        hints = get_type_hints(kind)
        for key in settings_of(name):
            wanted = set(get_args(hints[key])) if get_origin(hints[key]) is UnionType else {hints[key]}
            assert wanted <= set(get_args(known[key])), (name, key)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"method": "duo"}, "global_heads"),
        ({"method": "file", "path": "a"}, "path"),
        ({"method": "paro", "path": "a"}, "path"),
        ({"method": "sparge", "top_p": (0.5, 0.6)}, "top_p"),
        ({"method": "sparge", "top_p": [0.5, 0.6]}, "top_p"),
        ({"method": "sliding_tile", "window": ((1, 1, 1), (3, 3, 3))}, "window"),
        ({"method": "sliding_tile", "window": [[1, 1, 1], [3, 3, 3]]}, "window"),
        ({"method": "sliding_tile", "window": ((1, 1, 1),)}, None),
        ({"method": "sliding_tile", "window": (1, 1, 1)}, None),
        ({"method": "sliding_tile"}, None),
        ({"method": "sparge", "top_p": 0.5}, None),
        ({"method": "topp"}, None),
    ],
)
def test_setting_by_head_names_what_tells_heads_apart(options: dict[str, Any], setting: str | None) -> None:
    assert MaskConfig(**options).setting_by_head == setting


def test_check_model_refuses_as_many_dense_layers_as_there_are() -> None:
    """The method would act nowhere, without a word."""
    MaskConfig(method="topp", top_p=0.5, dense_layers=3).check_model(4, 4)
    MaskConfig(method="dense", dense_layers=4).check_model(4, 4)
    for method in ({"method": "topp", "top_p": 0.5}, {"method": "file", "path": "nowhere"}):
        with pytest.raises(ValueError, match="mask.dense_layers must be below the model's 4 attention layers, got 4"):
            MaskConfig(**method, dense_layers=4).check_model(4, 4)  # type: ignore[arg-type]


def test_check_model_refuses_heads_and_layers_that_there_are_not() -> None:
    MaskConfig(method="file", path="nowhere").check_model(1, 1)
    MaskConfig(method="duo", global_heads=((0,), (3,))).check_model(4, 2)
    for options, words in (
        ({"method": "duo", "global_heads": (4,)}, r"^mask\.global_heads names heads \[4\], attention has 4"),
        ({"method": "duo", "global_heads": ((0,),)}, r"^mask\.global_heads has 1 layers, none for layer 1"),
        ({"method": "sparge", "top_p": (0.5,) * 3}, r"^mask\.top_p has 3 shares, attention 4 heads"),
    ):
        with pytest.raises(ValueError, match=words):
            MaskConfig(**options).check_model(4, 2)  # type: ignore[arg-type]


def test_windows_and_shares_of_heads_reach_their_methods() -> None:
    windows = [[3, 3, 1], [1, 3, 1], [3, 3, 3]]
    made = build_mask_method(MaskConfig(method="sliding_tile", window=windows))  # type: ignore[arg-type]
    assert made == SlidingTileMask(window=((3, 3, 1), (1, 3, 1), (3, 3, 3)))
    made = build_mask_method(MaskConfig(method="sparge", top_p=[0.5, 0.6]))  # type: ignore[arg-type]
    assert made == SpargeMask((0.5, 0.6))
    with pytest.raises(ValueError, match=r"^mask\.top_p must be in \(0, 1\], got \(0.5, 0.6\)"):
        MaskConfig(method="topp", top_p=(0.5, 0.6))


def test_mask_config_is_frozen_and_keyword_only() -> None:
    config = MaskConfig()
    with pytest.raises(AttributeError):
        config.top_p = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        MaskConfig("topp")  # type: ignore[misc]


def test_mask_config_takes_global_heads_of_each_layer_as_nested_lists() -> None:
    """As they come from a checkpoint, which passed through JSON."""
    config = MaskConfig(method="duo", global_heads=[[0, 2], [1]])  # type: ignore[arg-type]
    method = build_mask_method(config)
    assert method == build_mask_method(MaskConfig(method="duo", global_heads=((0, 2), (1,))))
