"""Makes what the offline mask methods read: token orders and masks of `paro`, global heads of `duo`, masks of `file`.

Usage:
    python tools/calibrate_masks.py paro --run runs/demo --density 0.3 --output paro.safetensors
    python tools/calibrate_masks.py duo --run runs/demo --sink-tokens 16 --window-tokens 64 --output duo.yaml
    python tools/calibrate_masks.py file --run runs/demo --method topp:top_p=0.6 --output file.safetensors
    dbsp-infer --checkpoint runs/demo --sp-mask paro --mask.path paro.safetensors

Inputs are clips of a trained run of ours at some noise levels, or q, k and v that any model dumped (`--dumps`). Each
output is complete or absent; beside it lies a `.json` with the figures behind the choice. One process, one device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.masks import DuoMask, MaskFile, write_masks
from dbsp_megatron.masks.head_order import AXES, axis_orders
from dbsp_megatron.masks.tile_order import check_sizes
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from tools.attention_inputs import LayerInputs
from tools.attention_mass import block_mass, far_mass, order_figures
from tools.input_arguments import Inputs, add_input_arguments, open_inputs
from tools.mask_cases import ordered, parse_case
from tools.tables import aligned

AXIS_NAMES = ("frames", "rows", "columns")
FloatArray = NDArray[np.float64]


class Means:
    """Means of tensors by layer, in fp64 on the host."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def add(self, layer: int, value: Tensor) -> None:
        """One more value [1, ...] of a layer."""
        value = value[0].double().cpu()
        known = self._sums.get(layer)
        self._sums[layer] = value if known is None else known + value
        self._counts[layer] = self._counts.get(layer, 0) + 1

    @property
    def layers(self) -> list[int]:
        """Layers with a value, ascending."""
        return sorted(self._sums)

    def count(self, layer: int) -> int:
        """Values of a layer."""
        return self._counts[layer]

    def of(self, layer: int) -> Tensor:
        """The mean of a layer."""
        return self._sums[layer] / self._counts[layer]

    def each(self) -> list[tuple[int, Tensor]]:
        """Layers and their means."""
        return [(layer, self.of(layer)) for layer in self.layers]


def choose_orders(primary: Tensor, secondary: Tensor, num_kv_heads: int) -> list[int]:
    """The best order of each head, one for all query heads of a key head.

    Args:
        primary: [H, G], more is better.
        secondary: [H, G], decides where the first one is equal; then the lower index does.
        num_kv_heads: key heads.

    Returns:
        An index in 0 .. G - 1 for each head.
    """
    group = primary.shape[0] // num_kv_heads
    first, second = (x.unflatten(0, (num_kv_heads, group)).mean(1).numpy().round(9) for x in (primary, secondary))
    index = np.arange(primary.shape[1])
    best = [int(np.lexsort((index, -second[head], -first[head]))[0]) for head in range(num_kv_heads)]
    return [order for order in best for _ in range(group)]


def heaviest_blocks(score: Tensor, count: int) -> Tensor:
    """A mask of the blocks with the highest scores, every row's best one first; ties go by index.

    Args:
        score: [..., N, N], finite; blocks of all leading dims compete.
        count: dense blocks in all.

    Returns:
        bool like `score`; more than `count` blocks are dense only where there are more rows.
    """
    best = score.argmax(-1, keepdim=True)
    raised = score.double().scatter(-1, best, float("inf")).flatten()
    rows = best.numel()
    chosen = torch.zeros(raised.shape, dtype=torch.bool)
    chosen[raised.argsort(descending=True, stable=True)[: max(rows, min(count, raised.numel()))]] = True
    return chosen.view(score.shape)


def calibrate_paro(inputs: Inputs, given: argparse.Namespace) -> dict[str, Any]:
    """Order of axes and mask of every head; writes the file.

    Source:
        PAROAttention (arXiv:2506.16054): of the six orders of axes, that in which most blocks of the attention map are
        all but empty; then the blocks with the largest sums, averaged over calibration samples. The part of its
        criterion that serves quantization is left out. Small weights are counted relative to the uniform weight
        1 / tokens, ties go to the order whose heaviest blocks hold more, and the threshold on sums is set by a density.
        It is one for all heads of a layer, so that heads differ in density.
    """
    geometry = inputs.geometry
    places = axis_orders(geometry.tokens(), geometry.seqlen)
    empty, kept, kv_heads = Means(), Means(), {}

    def judge(x: LayerInputs) -> None:
        figures = order_figures(
            x.q, x.k, places, geometry.block_size,
            small=given.small, filled=given.filled, density=given.density, scale=x.scale,
        )  # fmt: skip
        empty.add(x.layer, figures.empty_share)
        kept.add(x.layer, figures.kept_mass)
        kv_heads[x.layer] = x.k.shape[2]

    inputs.go_through(judge)
    orders = {}
    for layer in empty.layers:
        both = (empty.of(layer), kept.of(layer))
        orders[layer] = choose_orders(*(both if given.criterion == "empty" else both[::-1]), kv_heads[layer])
    mass = Means()

    def pool(x: LayerInputs) -> None:
        own = places[orders[x.layer]].to(x.q.device)
        shared = own[:: x.q.shape[2] // x.k.shape[2]]
        q, k = (y.gather(1, index.T[None, ..., None].expand(y.shape)) for y, index in ((x.q, own), (x.k, shared)))
        mass.add(x.layer, block_mass(q, k, geometry.block_size, x.scale))

    inputs.go_through(pool)
    masks = {layer: heaviest_blocks(found, round(given.density * found.numel())) for layer, found in mass.each()}
    write_masks(
        given.output,
        masks,
        seqlen=geometry.seqlen,
        block_size=geometry.block_size,
        grid=geometry.tokens(),
        orders=orders,
    )
    return {
        "axis_orders": ["/".join(AXIS_NAMES[axis] for axis in axes) for axes in AXES],
        "layers": [
            {
                "layer": layer,
                "orders": orders[layer],
                "empty_share": empty.of(layer).tolist(),
                "kept_mass": kept.of(layer).tolist(),
                "density": masks[layer].double().mean((1, 2)).tolist(),
            }
            for layer in empty.layers
        ],
        "digest": MaskFile(given.output).digest,
    }


def global_heads(far: FloatArray, num_global: int) -> list[list[int]]:
    """The heads that would lose most as local ones, over all layers.

    Args:
        far: weight outside of sink and window, [L, H].
        num_global: heads to choose; ties go to the earlier layer and head.

    Returns:
        Ascending head indices of each layer.
    """
    order = np.argsort(-far.round(9), axis=None, kind="stable")[:num_global]
    layers, heads = np.unravel_index(order, far.shape)
    return [sorted(int(head) for head in heads[layers == layer]) for layer in range(far.shape[0])]


def calibrate_duo(inputs: Inputs, given: argparse.Namespace) -> dict[str, Any]:
    """Global heads of each layer (or of all layers alike); writes a YAML file with a section `mask`.

    Source:
        DuoAttention (arXiv:2410.10819) trains gates on the outputs of a head as a global and as a local one. Here a
        head's need is the softmax weight that it gives to keys outside of sink and window, the mean over queries,
        samples and steps.
    """
    geometry, far = inputs.geometry, Means()
    windows = {"sink_tokens": given.sink_tokens, "window_tokens": given.window_tokens}
    cube = None if given.cube is None else check_sizes("--cube", given.cube)
    local_heads = DuoMask((), **windows)

    def judge(x: LayerInputs) -> None:
        x = ordered(x, geometry, cube)
        far.add(x.layer, far_mass(x.q, x.k, geometry.block_size, scale=x.scale, **windows))

    inputs.go_through(judge)
    missing = sorted(set(range(inputs.num_layers)) - set(far.layers))
    if missing:
        raise ValueError(f"layers {missing} have no inputs, duo names heads of every layer: dump all of them")
    needs = torch.stack([far.of(layer) for layer in far.layers]).numpy()
    nothing = torch.zeros((1, geometry.seqlen, 1, 1), device=given.device)
    local = local_heads.mask(nothing, nothing, block_size=geometry.block_size).density
    share = 0.0 if local >= given.density else (given.density - local) / (1 - local)
    judged = needs.mean(0, keepdims=True) if given.shared_heads else needs
    chosen = global_heads(judged, round(share * judged.size))
    section = {"method": "duo", "global_heads": chosen[0] if given.shared_heads else chosen, **windows}
    if cube is not None:
        section["cube"] = list(cube)
    text = yaml.safe_dump({"mask": section}, sort_keys=False, default_flow_style=None)
    write_text(given.output, text)
    count = sum(map(len, chosen)) * (inputs.num_layers if given.shared_heads else 1)
    return {
        "far_mass": needs.tolist(),
        "local_density": local,
        "global_heads": section["global_heads"],
        "density": local + (1 - local) * count / needs.size,
        "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
    }


def calibrate_file(inputs: Inputs, given: argparse.Namespace) -> dict[str, Any]:
    """The blocks that a method picks most often, as many of each head as it picks on average; writes the file.

    Equally frequent blocks go by the weight that attention gives them.
    """
    geometry, case = inputs.geometry, parse_case(given.method)
    method, grid = case.build(), geometry.tokens(case.cube)
    masks, mass = Means(), Means()

    def collect(x: LayerInputs) -> None:
        if method.head_orders(x.layer, x.step, x.q.shape[2], x.k.shape[2], geometry.seqlen, grid) is not None:
            raise ValueError(f"--method {given.method} has token orders of its own: its file is the one to use")
        x = ordered(x, geometry, case.cube)
        blocks = method.mask(x.q, x.k, x.layer, x.step, grid, geometry.block_size, v=x.v, scale=x.scale).blocks
        masks.add(x.layer, blocks)
        mass.add(x.layer, block_mass(x.q, x.k, geometry.block_size, x.scale))

    inputs.go_through(collect)
    saved, agreement = {}, []
    for layer, often in masks.each():
        # One choice more or less outweighs any weight, which is at most 1.
        score = 2 * masks.count(layer) * often + mass.of(layer)
        counts = often.sum((1, 2)).round().int().tolist()
        saved[layer] = torch.stack([heaviest_blocks(*pair) for pair in zip(score, counts, strict=True)])
        agreement.append(float((often * saved[layer]).sum() / often.sum()))
    write_masks(given.output, saved, seqlen=geometry.seqlen, block_size=geometry.block_size, grid=grid)
    return {
        "method": method.describe(),
        "density": [float(saved[layer].double().mean()) for layer in masks.layers],
        "agreement": agreement,
        "digest": MaskFile(given.output).digest,
    }


def text_report(what: str, found: dict[str, Any]) -> str:
    """What was chosen, for people."""
    table: list[Sequence[str]]
    if what == "paro":
        table = [("layer", "head", "order of axes", "empty blocks", "frame order", "density")]
        for row in found["layers"]:
            for head, order in enumerate(row["orders"]):
                shares = row["empty_share"][head]
                table.append(
                    (
                        *(str(row["layer"]), str(head), found["axis_orders"][order]),
                        *(f"{value:.3f}" for value in (shares[order], shares[0], row["density"][head])),
                    )
                )
        return aligned(table, num_left=3)
    if what == "duo":
        table = [("layer", "weight outside sink and window, by head")]
        table += [(str(layer), " ".join(f"{x:.3f}" for x in heads)) for layer, heads in enumerate(found["far_mass"])]
        return f"{aligned(table)}\n\nglobal heads {found['global_heads']}, density {found['density']:.3f}"
    densities = ", ".join(f"{value:.3f}" for value in found["density"])
    return f"{found['method']}: density by layer {densities}"


_MAKERS = {
    "paro": (calibrate_paro, (".safetensors",)),
    "duo": (calibrate_duo, (".yaml", ".yml")),
    "file": (calibrate_file, (".safetensors",)),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    makers = parser.add_subparsers(dest="what", required=True, metavar="{paro,duo,file}")
    parsers = {
        what: makers.add_parser(what, help=(make.__doc__ or "").split("\n")[0]) for what, (make, _) in _MAKERS.items()
    }
    for own in parsers.values():
        add_input_arguments(own, dumps=True)
        own.add_argument("--output", type=Path, required=True, help="file to write")
    for what in ("paro", "duo"):
        parsers[what].add_argument(
            "--density", type=float, default=0.3, help="mean share of dense blocks (default: 0.3)"
        )
    paro, duo, file = (parsers[what] for what in _MAKERS)
    paro.add_argument(
        "--criterion",
        choices=("empty", "mass"),
        default="empty",
        help="order with most all but empty blocks (as published), or with most weight in the heaviest blocks",
    )
    paro.add_argument("--small", type=float, default=0.1, help="weights below this / tokens are small (default: 0.1)")
    paro.add_argument("--filled", type=float, default=0.9, help="small weights of an empty block (default: 0.9)")
    duo.add_argument("--sink-tokens", type=int, default=128)
    duo.add_argument("--window-tokens", type=int, default=256)
    duo.add_argument("--shared-heads", action="store_true", help="the same heads in all layers")
    duo.add_argument("--cube", type=int, nargs=3, metavar=("T", "H", "W"), help="order of tokens")
    file.add_argument("--method", required=True, help="NAME or NAME:key=value,...; cube=TxHxW for its order of tokens")
    return parser


def _check(given: argparse.Namespace) -> None:
    suffixes = _MAKERS[given.what][1]
    if given.output.suffix not in suffixes:
        raise ValueError(f"--output must end in {' or '.join(suffixes)} for {given.what}, got {given.output}")
    for key in ("density", "small", "filled"):
        value = getattr(given, key, 1.0)
        if not 0 < value <= 1:
            raise ValueError(f"--{key} must be in (0, 1], got {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written; 2 bad arguments or inputs."""
    given = _parser().parse_args(argv)
    try:
        _check(given)
        inputs = open_inputs(given)
        with torch.no_grad():
            found = _MAKERS[given.what][0](inputs, given)
    except (ValueError, OSError) as error:
        print(f"calibrate_masks: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    report = given.output.with_suffix(".json")
    facts = {"made": given.what, "inputs": inputs.facts, **found, "environment": collect_environment()}
    write_text(report, json.dumps(facts, indent=1, default=str) + "\n")
    print(text_report(given.what, found))
    print(f"written: {given.output} (digest {found['digest']}), {report.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
