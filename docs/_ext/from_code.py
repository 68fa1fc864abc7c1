"""Directives of Sphinx whose text comes from the code: public names, and settings of the command line."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, ClassVar, get_type_hints

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from comet.limits import limits_in


class FromCode(SphinxDirective):
    """A directive of one argument, which ``lines`` turns into MyST Markdown."""

    required_arguments = 1
    has_content = False

    def lines(self, name: str) -> Iterator[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        node = nodes.container()
        text = StringList(list(self.lines(self.arguments[0])), source=self.env.docname)
        self.state.nested_parse(text, self.content_offset, node, match_titles=False)
        return node.children


class PublicNames(FromCode):
    """Every public name of a module; ``errors`` chooses exceptions or leaves them out."""

    option_spec: ClassVar = {"errors": lambda text: {"only": True, "no": False}[text]}

    def lines(self, name: str) -> Iterator[str]:
        wanted = self.options.get("errors")
        for each, found in public_names(name):
            if wanted is None or wanted == is_error(found):
                yield from documented(name, each, found)


class Settings(FromCode):
    """Every setting that a task of the command line reads, from the text of ``comet TASK --help``."""

    def lines(self, name: str) -> Iterator[str]:
        from comet.launch.help import task_page
        from comet.launch.tasks.registry import TASKS

        _, _, settings = task_page(name, TASKS[name]).partition(f"\nsettings and their defaults for {name}:\n")
        for setting, text in re.findall(r"^  (\S.*)\n((?:   .*\n)*)", settings, re.MULTILINE):
            shown = re.sub(r"-\d{8}-\d{6}", "-DATE", setting)
            yield from ("", f"`{shown}`", f": {' '.join(text.split())}")


def public_names(module: str) -> Iterator[tuple[str, Any]]:
    """The names of ``__all__``, or else the functions and classes that a package imports from its own modules."""
    found = importlib.import_module(module)
    for name in getattr(found, "__all__", vars(found)):
        value = getattr(found, name)
        is_own = getattr(value, "__module__", "").startswith("comet.")
        if is_own and not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def documented(module: str, name: str, value: Any) -> list[str]:
    kind = "function" if inspect.isfunction(value) else "exception" if is_error(value) else "class"
    members = [] if kind != "class" else ["   :members:"]
    return ["```{eval-rst}", f".. auto{kind}:: {module}.{name}", *members, "```", ""]


def add_limits(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Give each argument of a dataclass its type and its limits in words, as the pages of help do."""
    if what != "class" or not is_dataclass(found):
        return
    for field, hint in get_type_hints(found, include_extras=True).items():
        limits = limits_in(hint)
        if limits.kind in (int, float, bool) and (words := limits.words(limits.limits)):
            lines.append(f":type {field}: {limits.kind.__name__}, {words.removeprefix('be ')}")
    lines.append("")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("comet-names", PublicNames)
    app.add_directive("comet-settings", Settings)
    app.connect("autodoc-process-docstring", add_limits, priority=600)  # behind napoleon
    return {"parallel_read_safe": True}
