"""README and docs, as the tests of documentation read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\S*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A block of code between fences.

    Attributes:
        page: name of the page, from the root. line: of the fence. kind: the word after the fence.
    """

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Names of all pages that people read, from the root."""
    names = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "costmodel/README.md"]
    names += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
    return [name for name in names if (ROOT / name).is_file()]


def text_of(page: str) -> str:
    """The whole text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """The blocks of code of a page, in their order."""
    text = text_of(page)
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["kind"], found["text"])
        for found in _FENCE.finditer(text)
    ]


def prose_of(page: str) -> str:
    """A page without its blocks of code, tables that are made, and comments; one space for each."""
    text = _FENCE.sub("", text_of(page))
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split())
