"""PatternCache and MaskPatterns: what is found again, what is dropped, and use from several threads."""

from __future__ import annotations

import gc
import threading

import torch

from dbsp_megatron.attention.engines import BlockPattern
from dbsp_megatron.attention.pattern_cache import MaskPatterns, PatternCache

CPU = torch.device("cpu")


def _patterns(num_blocks: int) -> BlockPattern:
    return BlockPattern(torch.ones(1, 1, 1, num_blocks, dtype=torch.bool), 16, 16)


def test_pattern_cache_drops_what_was_unused_for_longest() -> None:
    cache = PatternCache(max_blocks=10)
    kept = {name: _patterns(4) for name in "abc"}
    for name in "ab":
        cache.keep(name, kept[name])
    assert cache.find("a") is kept["a"]
    cache.keep("c", kept["c"])
    assert [name for name in "abc" if cache.find(name) is kept[name]] == ["a", "c"]
    assert cache.find("b") is None


def test_pattern_cache_keeps_one_entry_whatever_its_size() -> None:
    cache = PatternCache(max_blocks=10)
    cache.keep("small", _patterns(1))
    cache.keep("large", _patterns(100))
    assert cache.find("large") is not None
    assert len(cache) == 1


def test_pattern_cache_makes_once() -> None:
    cache, made = PatternCache(), []

    def make() -> BlockPattern:
        made.append(_patterns(1))
        return made[-1]

    first = cache.find_or_make("key", CPU, make)
    assert cache.find_or_make("key", CPU, make) is first
    assert len(made) == 1
    assert cache.find_or_make("other", CPU, make) is made[1]


def test_mask_patterns_let_go_of_masks_and_replace_what_was_written_to() -> None:
    masks = MaskPatterns()
    blocks = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    first = masks.pattern(blocks, 16, 16, fresh=True)
    assert masks.pattern(blocks, 16, 16, fresh=False) is first
    assert masks.pattern(blocks.view(1, 2, 3, 3), 16, 16, fresh=False) is not first
    assert len(masks) == 1
    blocks[0, 0] = False
    second = masks.pattern(blocks, 16, 16, fresh=False)
    assert second is not first
    assert torch.equal(second.blocks, blocks)
    assert len(masks) == 1
    del first, second, blocks
    gc.collect()
    assert len(masks) == 0


def test_mask_patterns_hold_a_bounded_number_of_blocks() -> None:
    masks = MaskPatterns(max_blocks=40)
    tensors = [torch.ones(1, 1, 3, 3, dtype=torch.bool) for _ in range(9)]
    for blocks in tensors:
        masks.pattern(blocks, 16, 16, fresh=True)
    assert len(masks) == 4


def test_mask_patterns_from_several_threads() -> None:
    """Masks come and go in every thread, and all share one more."""
    masks = MaskPatterns(max_blocks=100)
    shared = torch.rand(1, 2, 4, 4) < 0.5
    faults: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            own = torch.rand((1, 2, 4, 4), generator=generator) < 0.5
            for blocks in (own, shared):
                lists = masks.pattern(blocks, 16, 16, fresh=False).lists(transpose=True)
                if not torch.equal(lists.count, blocks.sum(-1, dtype=torch.int32)) or lists.t_count is None:
                    faults.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    gc.collect()
    assert len(masks) <= 1
