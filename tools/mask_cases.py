"""Mask methods named on a command line, and the setting that gives each a wanted density."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from dbsp_megatron.masks import METHODS, MaskMethod, SlidingTileMask
from dbsp_megatron.masks.config import settings_of
from dbsp_megatron.masks.tile_order import check_sizes
from tools.attention_inputs import Geometry, LayerInputs

Cube = tuple[int, int, int]
_WINDOWS_TRIED = 16
"""Windows of a sliding tile whose blocks are counted, of those whose share of tiles is nearest to the target."""


@dataclass(frozen=True, kw_only=True)
class MaskCase:
    """A method with its settings and the order of tokens that it is used in."""

    label: str
    """How tables name it."""
    name: str
    """The method's name."""
    settings: dict[str, Any]
    """What is given to the method."""
    cube: Cube | None = None
    """Cubes by which tokens are ordered; None for raster order."""

    def build(self) -> MaskMethod:
        """The method.

        Raises:
            ValueError: an unknown method, or a setting that it does not have or take.
        """
        if self.name not in METHODS:
            raise ValueError(f"mask methods are {', '.join(METHODS)}, got {self.name!r}: use one of these names")
        known = settings_of(self.name)
        for key in self.settings:
            if key not in known:
                raise ValueError(f"{self.label}: {self.name} has no setting {key!r}, only {', '.join(known) or 'none'}")
        try:
            return METHODS[self.name](**self.settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.label}: {error}") from error

    def with_setting(self, key: str, value: Any) -> MaskCase:
        """The case with one setting replaced."""
        return replace(self, settings={**self.settings, key: value})

    @property
    def settings_text(self) -> str:
        """Settings in a few words; files by their names."""
        words = [f"{key} {_in_words(key, value)}" for key, value in self.settings.items()]
        if self.cube is not None:
            words.append(f"cubes {_short(self.cube)}")
        return ", ".join(words) or "-"


def _in_words(key: str, value: Any) -> str:
    if key == "global_heads" and value and isinstance(value[0], tuple):
        return f"{sum(map(len, value))} in {len(value)} layers"
    if key == "global_heads":
        return "+".join(map(str, value)) or "none"
    return _short(value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return Path(value).name
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "+".join(map(_short, value))
    if isinstance(value, tuple):
        sizes = len(value) == 3 and all(isinstance(part, int) for part in value)
        return ("x" if sizes else "+").join(map(_short, value)) or "none"
    return str(value)


def parse_case(text: str) -> MaskCase:
    """A case from `NAME`, `NAME:key=value,...`, or the `mask` section of a YAML file.

    Values are YAML; `2x2x4` is three sizes, `0+3` a list, as is `1x3x1+3x1x3`. `cube` is the token order, `label` the
    name in tables.

    Raises:
        ValueError: it cannot be read.
    """
    if text.endswith((".yaml", ".yml")):
        name, settings = _from_yaml(Path(text))
    else:
        name, _, rest = text.partition(":")
        settings = {}
        for word in filter(None, rest.split(",")):
            key, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"{text!r}: settings are key=value with commas between, got {word!r}")
            settings[key] = value if key in ("path", "label") else _value(value)
            if key == "global_heads" and isinstance(settings[key], int):
                settings[key] = (settings[key],)
    cube = settings.pop("cube", None)
    usual = name if cube is None else f"{name}, cubes"
    label = str(settings.pop("label", usual))
    case = MaskCase(label=label, name=name, settings=settings, cube=None if cube is None else check_sizes("cube", cube))
    case.build()
    return case


def _value(text: str) -> Any:
    parts = text.split("x")
    if len(parts) == 3 and all(part.isdecimal() for part in parts):
        return tuple(map(int, parts))
    if "+" in text:
        several = tuple(map(_value, text.split("+")))
        if all(isinstance(part, (int, float, tuple)) for part in several):
            return several
    return _tuples(yaml.safe_load(text))


def _from_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        section = yaml.safe_load(path.read_text(encoding="utf-8"))["mask"]
        settings = {key: _tuples(value) for key, value in section.items() if value is not None}
        return settings.pop("method"), settings
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be YAML with a section mask that names a method: {error!r}") from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def unique_labels(cases: Sequence[MaskCase]) -> None:
    """Refuse two cases of one name.

    Raises:
        ValueError: there are.
    """
    labels = [case.label for case in cases]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(f"cases must have names of their own, {twice[0]!r} is there twice: add label=NAME to one")


def ordered(inputs: LayerInputs, geometry: Geometry, cube: Cube | None) -> LayerInputs:
    """Inputs with their tokens in another order."""
    if cube is None:
        return inputs
    order = geometry.order(cube).to(inputs.q.device)
    v = None if inputs.v is None else inputs.v[:, order]
    return replace(inputs, q=inputs.q[:, order], k=inputs.k[:, order], v=v)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """The setting of a method by which its density rises."""

    key: str
    low: float
    high: float
    whole: bool = False
    """Whether it is an integer."""

    def between(self, low: float, high: float, count: int) -> list[float]:
        """Values from `low` to `high`, evenly on a logarithmic scale, without repeats."""
        ratio = high / low
        values = [low * ratio ** (index / (count - 1)) for index in range(count)]
        return sorted({float(round(x)) if self.whole else min(self.high, float(f"{x:.5g}")) for x in values})


def knob_of(case: MaskCase, seqlen: int) -> Knob | None:
    """What to turn; None if the case has fixed settings or nothing of the kind."""
    knobs = {
        "topp": Knob(key="top_p", low=0.005, high=1.0),
        "sparge": Knob(key="top_p", low=0.005, high=1.0),
        "topk": Knob(key="density", low=0.005, high=1.0),
        "vsa": Knob(key="density", low=0.005, high=1.0),
        "sparse_videogen": Knob(key="density", low=0.005, high=1.0),
        "radial": Knob(key="width", low=0.01, high=16.0),
        "duo": Knob(key="window_tokens", low=1, high=seqlen, whole=True),
    }
    knob = knobs.get(case.name)
    return None if knob is None or knob.key in case.settings else knob


Densities = Callable[[Sequence[MaskCase]], list[float]]
"""Mean density of each of some cases on a few inputs."""


def match_density(
    cases: Sequence[MaskCase],
    target: float,
    geometry: Geometry,
    densities: Densities,
    *,
    device: torch.device,
    passes: int = 4,
) -> list[MaskCase]:
    """Give each case that leaves it open the setting whose density is nearest to a target.

    Args:
        cases: cases; those with nothing to turn are returned as they are.
        target: wanted density, in (0, 1].
        geometry: grid, tokens and block size.
        densities: measures candidates of all cases at once, so that a pass costs one model call for all.
        device: where static masks are made.
        passes: how often the interval is narrowed, by about seven times each.

    Raises:
        ValueError: the target is out of range.
    """
    if not 0 < target <= 1:
        raise ValueError(f"--density must be in (0, 1], got {target}")
    chosen = [_with_window(case, target, geometry, device) for case in cases]
    knobs = {index: knob for index, case in enumerate(chosen) if (knob := knob_of(case, geometry.seqlen))}
    found: dict[int, dict[float, float]] = {index: {} for index in knobs}
    spans = {index: (knob.low, knob.high) for index, knob in knobs.items()}
    for _ in range(passes):
        wanted = [
            (index, value)
            for index, knob in knobs.items()
            for value in [*knob.between(*spans[index], 8), *([target] if knob.key == "density" else [])]
            if value not in found[index]
        ]
        if not wanted:
            break
        tried = [_turned(chosen[index], knobs[index], value) for index, value in wanted]
        for (index, value), density in zip(wanted, densities(tried), strict=True):
            found[index][value] = density
        for index, known in found.items():
            below = [value for value, density in known.items() if density <= target]
            above = [value for value, density in known.items() if density >= target]
            spans[index] = (max(below, default=knobs[index].low), min(above, default=knobs[index].high))
            if spans[index][0] > spans[index][1]:
                spans[index] = spans[index][::-1]
    for index, known in found.items():
        best = min(known, key=lambda value: (round(abs(known[value] - target), 9), abs(value - target)))
        chosen[index] = _turned(chosen[index], knobs[index], best)
    return chosen


def _turned(case: MaskCase, knob: Knob, value: float) -> MaskCase:
    return case.with_setting(knob.key, int(value) if knob.whole else value)


def _with_window(case: MaskCase, target: float, geometry: Geometry, device: torch.device) -> MaskCase:
    """The window of a sliding tile whose density is nearest; of equal ones the most even."""
    if case.name != "sliding_tile" or "window" in case.settings:
        return case
    tile = case.settings.get("tile", case.cube or SlidingTileMask().tile)
    tiles = [-(-size // own) for size, own in zip(geometry.grid, tile, strict=True)]
    deep, high, wide = (range(1, 2 * (count // 2) + 2, 2) for count in tiles)
    windows = list(itertools.product(deep, high, wide))

    def far_off(window: Cube) -> float:
        share = math.prod(min(1.0, side / count) for side, count in zip(window, tiles, strict=True))
        return abs(math.log(share / target))

    nothing = torch.zeros((1, geometry.seqlen, 1, 1), device=device)
    tried = []
    for window in sorted(windows, key=far_off)[:_WINDOWS_TRIED]:
        method = SlidingTileMask(tile, window)
        mask = method.mask(nothing, nothing, grid=geometry.tokens(case.cube), block_size=geometry.block_size)
        tried.append((abs(mask.density - target), max(window) / min(window), window))
    return case.with_setting("tile", tile).with_setting("window", min(tried)[2])
