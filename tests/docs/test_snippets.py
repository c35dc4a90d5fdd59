"""Python code of the documentation runs, page by page, on as many ranks as the page says."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, is_python, pages
from tests.docs.preludes import prelude
from tests.harness import run_ranks

WITH_CODE = [page for page in pages() if any(is_python(block) for block in blocks(page))]


def _ranks(found: list[Block]) -> int:
    """Ranks that a page asks for, by `<!-- test: ranks N -->` in front of a block; one if it asks for none."""
    return max([1, *(int(block.note.split()[1]) for block in found if block.note.startswith("ranks"))])


def _execute(rank: int, world_size: int, page: str, code: list[tuple[str, int, str]], folder: str) -> list[str]:
    os.chdir(folder)
    module = types.ModuleType("documentation")
    module.__dict__.update(prelude(page))
    sys.modules[module.__name__] = module  # where dataclasses look for the names of their module
    for where, line, text in code:
        # Line numbers in a traceback are those of the page.
        exec(compile("\n" * line + text, where.split(":")[0], "exec", dont_inherit=True), module.__dict__)
    return [where for where, _, _ in code]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_runs(page: Path, tmp_path: Path) -> None:
    found = [block for block in blocks(page) if is_python(block)]
    code = [(block.where, block.line, block.text) for block in found]
    name = page.relative_to(ROOT).as_posix()
    results = run_ranks(_execute, _ranks(found), name, code, str(tmp_path), timeout_s=200)
    assert results[0] == [block.where for block in found]
