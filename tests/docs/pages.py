"""Commands and code of the documentation, as a reader sees them, with the notes that say how a test runs them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"<!-- test: (.+?) -->\s*\Z")
SHELL = ("", "bash", "sh", "shell", "console")
NOTES = ("run", "parse", "external", "ranks", "text", "fragment")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: path below the root.
        line: of the opening fence.
        language: word behind the fence; empty for commands.
        note: what a comment in front of the block says of it, such as `parse`; `run` without one.
        text: between the fences.
    """

    page: str
    line: int
    language: str
    note: str
    text: str

    @property
    def where(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README, every page of docs/ and the README of the launch scripts."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "launch" / "README.md"]
    return [page for page in found if page.is_file()]


def blocks(page: Path) -> list[Block]:
    """Fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        note = NOTE.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        words = note.group(1) if note else "run"
        if words.split()[0] not in NOTES:
            raise ValueError(f"{page.name}:{line}: unknown note 'test: {words}'; use one of {', '.join(NOTES)}")
        found.append(Block(page.relative_to(ROOT).as_posix(), line, match.group(1), words, match.group(2)))
    return found


def commands(block: Block) -> list[list[str]]:
    """Command lines of a block as words; continued lines are joined, comments and a `$` in front left out."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def is_shell(block: Block) -> bool:
    """Whether a reader would type this."""
    return block.language in SHELL and block.note not in ("text", "fragment")


def is_python(block: Block) -> bool:
    """Whether it is code that runs, alone or after the blocks above it."""
    return block.language == "python" and block.note != "fragment"
