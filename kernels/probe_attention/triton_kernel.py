"""Triton kernels of the probe attention: parts of the keys side by side, then their sums in order.

Every mask has rows of its own: row `query * masks + mask`, where mask 0 is none and queries of a kv head are its group
times the probe rows. All rows of a query find the same peaks, and products fill the tensor cores, which a few probe
rows alone would not; to compute their scores once per mask costs less than that gains.

Dims: B batch, Hkv kv heads, m probe rows, s keys, D/Dv head dims, C candidates, P parts of the keys, R rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.lists import multiprocessors
from dbsp_megatron.kernels.block_sparse_attention.portable_config import TileConfig, is_large, padded_dim
from dbsp_megatron.kernels.block_sparse_attention.portable_tiles import LOG2E, load_tile, tile_source, tma_applies

from .naive import FP16_RAISE

_LN2 = tl.constexpr(0.6931471805599453)
_PROGRAMS_PER_MULTIPROCESSOR = 4
_MIN_KEYS = 512
"""Keys of a part at least: what a part costs to write and merge is then little beside them."""
_TILE_KEYS = 64
"""Keys of a tile at most, to a multiple of which rows of bits are padded."""
_WORDS_PER_PROGRAM = 64

_SIZES = ["num_keys", "part_keys", "num_probes", "num_masks", "group", "kv_heads", "num_rows", "row_tiles", "num_pairs"]


@triton.jit(do_not_specialize=["num_probes", "num_keys", "num_words", "stride_c", "stride_m", "stride_s"])
def _pack_kernel(
    allowed_ptr, bits_ptr, num_probes, num_keys, num_words, stride_c, stride_m, stride_s, WORDS: tl.constexpr
):
    # One bit a key, 32 in a word: a tile of the products below then reads two words a row, and keeps them in registers.
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    place = tl.arange(0, 32)
    key = word[:, None] * 32 + place[None, :]
    row_ptr = allowed_ptr + row // num_probes * stride_c + row % num_probes * stride_m
    allowed = tl.load(row_ptr + key.to(tl.int64) * stride_s, mask=key < num_keys, other=0).to(tl.int32)
    tl.store(bits_ptr + row * num_words + word, tl.sum(allowed << place[None, :], 1), mask=word < num_words)


# Strides of k and v are specialised (on divisibility by 16), or no load could be wider than an element.
@triton.jit(do_not_specialize=["scale_log2", *_SIZES, "num_words"])
def _part_kernel(
    q_ptr,
    k,
    v,
    bits_ptr,
    sums_ptr,
    stats_ptr,
    scale_log2,
    num_keys,
    part_keys,
    num_probes,
    num_masks,
    group,
    kv_heads,
    num_rows,
    row_tiles,
    num_pairs,
    num_words,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    RAISE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TMA: tl.constexpr,
):
    # Row tiles of a head and part run side by side and find k and v in the cache; so do heads, whose tokens adjoin.
    place = tl.program_id(0)
    pair = place // row_tiles % num_pairs
    part = place // row_tiles // num_pairs
    sample = pair // kv_heads
    kv_head = pair % kv_heads
    row = place % row_tiles * M + tl.arange(0, M)
    in_rows = row < num_rows
    mask = row % num_masks
    probe = row // num_masks % num_probes
    member = row // num_masks // num_probes
    token = tl.arange(0, N)
    dim = tl.arange(0, DIM_PAD)
    value_dim = tl.arange(0, VALUE_PAD)

    q_row = ((sample * num_probes + probe) * kv_heads + kv_head).to(tl.int64) * group + member
    q = tl.load(q_ptr + (q_row * DIM)[:, None] + dim[None, :], mask=in_rows[:, None] & (dim < DIM)[None, :], other=0.0)
    bits_row_ptr = bits_ptr + ((mask - 1) * num_probes + probe).to(tl.int64) * num_words
    masked = in_rows & (mask > 0)
    bit = token % 32

    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, VALUE_PAD), tl.float32)
    begin = part * part_keys
    end = tl.minimum(begin + part_keys, num_keys)
    for i in tl.range(0, (end - begin + N - 1) // N):
        first = begin + i * N
        k_tile = load_tile(
            k, sample, first, kv_head, k_stride_b, k_stride_s, k_stride_h, num_keys, DIM, N, DIM_PAD, TMA, True
        )
        v_tile = load_tile(
            v, sample, first, kv_head, v_stride_b, v_stride_s, v_stride_h, num_keys, VALUE_DIM, N, VALUE_PAD, TMA, True
        )
        words = tl.load(bits_row_ptr + first // 32, mask=masked, other=-1)[:, None]
        if N == 64:
            second = tl.load(bits_row_ptr + first // 32 + 1, mask=masked, other=-1)[:, None]
            words = tl.where(token[None, :] < 32, words, second)
        scores = tl.dot(q, tl.trans(k_tile)) * scale_log2
        scores = tl.where((first + token < num_keys)[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Scores of -inf alone weigh nothing.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        keep = tl.math.exp2(peak - base)
        # A product, not a choice: NaN stays NaN, as in the twin.
        allowed = ((words >> bit[None, :]) & 1) != 0
        weights = tl.math.exp2(scores - base[:, None]) * tl.where(allowed, 1.0, 0.0)
        total = total * keep + tl.sum(weights, 1)
        raised = weights * RAISE
        high = raised.to(v_tile.dtype)
        low = (raised - high.to(tl.float32)).to(v_tile.dtype)
        acc = tl.dot(high, v_tile, acc * keep[:, None])
        acc = tl.dot(low, v_tile, acc)
        peak = new_peak

    out_row = (part.to(tl.int64) * num_pairs + pair) * num_rows + row
    tl.store(stats_ptr + out_row * 2, peak, mask=in_rows)
    tl.store(stats_ptr + out_row * 2 + 1, total, mask=in_rows)
    tl.store(
        sums_ptr + out_row[:, None] * VALUE_DIM + value_dim[None, :],
        acc * (1.0 / RAISE),
        mask=in_rows[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_parts", "all_rows", "num_masks"])
def _merge_kernel(
    sums_ptr, stats_ptr, result_ptr, num_parts, all_rows, num_masks, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    value_dim = tl.arange(0, VALUE_PAD)
    inside = value_dim < VALUE_DIM
    highest = tl.full((), float("-inf"), tl.float32)
    for part in tl.range(0, num_parts):
        highest = tl.maximum(highest, tl.load(stats_ptr + (part * all_rows + row) * 2))
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((VALUE_PAD,), tl.float32)
    for part in tl.range(0, num_parts):
        place = part * all_rows + row
        peak = tl.load(stats_ptr + place * 2)
        factor = tl.where(peak == float("-inf"), 0.0, tl.math.exp2(peak - highest))
        total += tl.load(stats_ptr + place * 2 + 1) * factor
        acc += tl.load(sums_ptr + place * VALUE_DIM + value_dim, mask=inside, other=0.0) * factor
    mask = row % num_masks
    query_ptr = result_ptr + row // num_masks * (1 + num_masks * (1 + VALUE_DIM))
    # Maxima pass over NaN, sums do not.
    known = (total == total) | (highest == float("inf"))
    tl.store(query_ptr, tl.where(known, highest * _LN2, float("nan")), mask=mask == 0)
    tl.store(query_ptr + 1 + mask * (1 + VALUE_DIM), total)
    tl.store(query_ptr + 2 + mask * (1 + VALUE_DIM) + value_dim, acc, mask=inside)


def triton_probe_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Attend as `probe_attention` does, on CUDA (or on CPU in Triton's interpreter).

    Args:
        q: fp16, bf16 or fp32 [B, m, H, D], any strides, D up to 256.
        k: fp16 or bf16 [B, s, Hkv, D], any strides, at least one key.
        v: of the same dtype [B, s, Hkv, Dv], any strides, Dv up to 256.
        allowed: bool [C, m, s].
        scale: softmax scale.

    Returns:
        fp32 [B, H, m, 1 + (1 + C) * (1 + Dv)]; see `probe_attention`.

    Launch grid: P * B * Hkv * ceil(R / 64 or 128) programs, about four a multiprocessor, of at least 512 keys; then one
    for each of B * Hkv * R rows; before them C * m * ceil(s / 2048) that pack `allowed` into bits. Peak extra memory: P
    times the result, those bits, and copies of k and v if their D is not adjacent.
    """
    batch, num_probes, heads, dim = q.shape
    num_keys, kv_heads, value_dim = k.shape[1], k.shape[2], v.shape[3]
    masks, group = allowed.shape[0] + 1, heads // kv_heads
    num_rows, pairs = group * num_probes * masks, batch * kv_heads
    config = _tile_config(num_rows, dim, value_dim, not k.is_cuda or is_large(k.device))
    row_tiles = triton.cdiv(num_rows, config.block_m)
    num_parts, part_keys = _parts(num_keys, pairs * row_tiles, config.block_n, multiprocessors(k.device))
    num_words = triton.cdiv(num_keys, _TILE_KEYS) * (_TILE_KEYS // 32)
    bits = torch.empty((masks - 1, num_probes, num_words), dtype=torch.int32, device=k.device)
    sums = q.new_empty((num_parts, pairs * num_rows, value_dim), dtype=torch.float32)
    stats = q.new_empty((num_parts, pairs * num_rows, 2), dtype=torch.float32)
    result = q.new_empty((batch, heads, num_probes, 1 + masks * (1 + value_dim)), dtype=torch.float32)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    tma = tma_applies(config, k, v)
    with torch.cuda.device_of(k):
        if masks > 1:
            _pack_kernel[((masks - 1) * num_probes, triton.cdiv(num_words, _WORDS_PER_PROGRAM))](
                allowed.view(torch.int8),
                bits,
                num_probes,
                num_keys,
                num_words,
                *allowed.stride(),
                WORDS=_WORDS_PER_PROGRAM,
            )
        _part_kernel[(num_parts * pairs * row_tiles,)](
            # Converted in the kernel it would be held in registers, which there are too few of.
            q.to(k.dtype).contiguous(),
            tile_source(k, config.block_n, tma),
            tile_source(v, config.block_n, tma),
            bits,
            sums,
            stats,
            scale * LOG2E,
            num_keys,
            part_keys,
            num_probes,
            masks,
            group,
            kv_heads,
            num_rows,
            row_tiles,
            pairs,
            num_words,
            *k.stride()[:3],
            *v.stride()[:3],
            DIM=dim,
            DIM_PAD=padded_dim(dim),
            VALUE_DIM=value_dim,
            VALUE_PAD=padded_dim(value_dim),
            RAISE=FP16_RAISE if v.dtype == torch.float16 else 1.0,
            M=config.block_m,
            N=config.block_n,
            TMA=tma,
            **config.launch_options,
        )
        _merge_kernel[(pairs * num_rows,)](
            sums,
            stats,
            result,
            num_parts,
            pairs * num_rows,
            masks,
            VALUE_DIM=value_dim,
            VALUE_PAD=padded_dim(value_dim),
            num_warps=1,
        )
    return result


def _tile_config(num_rows: int, dim: int, value_dim: int, large: bool = True) -> TileConfig:
    """Tiles for R rows a kv head; `large`: the device has the shared memory of a Hopper GPU."""
    # From 64 rows on, products are those of a warpgroup. One program of 128 rows fills a multiprocessor, with two tiles
    # of keys under way; of the others two do.
    tall = large and num_rows > 64
    keys = _TILE_KEYS if large and max(dim, value_dim) <= 128 else _TILE_KEYS // 2
    return TileConfig(
        block_m=128 if tall else 64,
        block_n=keys,
        num_warps=8 if tall else 4,
        num_stages=3 if tall and keys == _TILE_KEYS else 2,
    )


def _parts(num_keys: int, others: int, tile: int, multiprocessors: int) -> tuple[int, int]:
    """How many parts of the keys, and keys of a part: whole tiles, the last part may be short but is not empty.

    Args:
        num_keys: keys, at least 1.
        others: programs of one part.
        tile: keys of a tile.
        multiprocessors: of the device.
    """
    wanted = max(1, min(_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // others, num_keys // _MIN_KEYS))
    part_keys = triton.cdiv(triton.cdiv(num_keys, wanted), tile) * tile
    return triton.cdiv(num_keys, part_keys), part_keys
