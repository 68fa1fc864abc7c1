"""The pages for readers, README, CONTRIBUTING and ``docs/``, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str, language: str) -> list[str]:
    """Return the blocks of code of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def program(page: str) -> str:
    """Return the Python blocks of a page, one after the other."""
    return "\n".join(fences(page, "python"))


def commands(page: str) -> list[str]:
    """Return the lines of the shell blocks of a page; scripts with a ``#!`` have tests of their own."""
    blocks = [block for block in fences(page, "bash") if not block.startswith("#!")]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
