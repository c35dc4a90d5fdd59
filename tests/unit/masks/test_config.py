"""MaskConfig: refusals name the key, the rule and the value; settings reach the method that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbsp_megatron import MaskConfig, build_mask_method
from dbsp_megatron.masks import METHODS, FileMask, MaskMethod, ScheduledMask, write_masks
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
