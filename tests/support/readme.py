"""The Python snippets of README.md."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def snippets(section: str) -> list[str]:
    """Return the Python snippets of a section."""
    ((_, text),) = re.findall(rf"^## ({re.escape(section)})\n((?:(?!## ).*\n)*)", README.read_text(), re.MULTILINE)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)
