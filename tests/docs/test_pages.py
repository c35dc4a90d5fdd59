"""Links, pictures and quoted error messages of the documentation are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, ROOT, pages

LINK = re.compile(r"\]\(([^)\s]+)\)")
MESSAGE = re.compile(r"^### `(.+)`$", re.MULTILINE)
SOURCES = ("dbsp_megatron", "tools", "launch")


def _anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    missing = []
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        if not file.exists():
            missing.append(target)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(_anchor, headings):
                missing.append(target)
    assert not missing


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = [page.name for page in pages() if page.parent.name == "docs" and page.name != "README.md"]
    assert names
    assert [name for name in names if f"({name})" not in index] == []


def test_every_picture_is_shown() -> None:
    shown = {Path(target).name for page in pages() for target in LINK.findall(page.read_text(encoding="utf-8"))}
    pictures = {path.name for path in (ROOT / "docs" / "images").glob("*")}
    assert pictures
    assert pictures - shown == set()


def test_quoted_errors_exist() -> None:
    """Headings of the troubleshooting page quote messages; `...` stands for what varies."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".sh", ".sbatch")
    )
    # Messages are cut by lines of the source: "..." f"..." is one text.
    sources = re.sub(r"\"\s*\n\s*f?\"", "", sources)
    quoted = MESSAGE.findall(page)
    assert len(quoted) >= 10
    absent = [part for message in quoted for part in message.split("...") if part.strip() and part not in sources]
    assert not absent
