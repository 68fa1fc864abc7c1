"""The rules of the code base, read from its syntax trees: every test lists all violations at once.

Import direction: launch, benchmarks, tests -> comet -> comet.kernels -> {torch, triton}, and within these as
``ROOMS`` and ``KERNEL_ROOMS`` say, so that no two folders import each other, nor do files. Each rule is a function from
a ``Source`` to messages, and is itself attacked with a snippet that must be caught. What ruff can see is left to it
(``make lint``): who reads the environment, excepts that catch everything.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("comet", "kernels", "launch", "benchmarks", "tests")
LIBRARY = ("comet", "kernels", "launch")

OPTIONAL = (
    "hydra",
    "omegaconf",
    "nvshmem",
    "megatron",
    "transformers",
    "datasets",
    "pyarrow",
    "tokenizers",
    "vllm",
    "matplotlib",
    "cuda",
)
FORBIDDEN = {
    "kernels": ("comet", "benchmarks", "tests"),  # but its own package, comet.kernels
    "comet": ("comet.launch", "comet.configs", "benchmarks", "tests", "cuda"),
    "launch": ("tests", "cuda"),
    "benchmarks": ("tests", "cuda"),
    "tests": ("cuda",),
}
# The one package besides torch and triton that kernels import, and where; callers ask first whether it is there.
BINDINGS, BINDINGS_IN = "cuda.bindings", "kernels/runtime/nvrtc.py"
# Folders and files of comet, and the folders of kernels, from the ground up: each imports of the rows below it only.
ROOMS = (
    ("kernels",),
    ("capabilities", "limits"),
    ("config", "errors", "utils", "version"),
    ("layout",),
    ("comm", "quantization", "router", "schedule"),
    ("reference",),
    ("layer",),
    ("decode", "moe", "trace"),
    ("data_parallel", "redundant_experts", "experts", "graphed", "models", "modular"),
    ("integrations", "jobs"),
    ("training",),
    ("tuner",),
    ("generation",),
    ("launch",),
)
KERNEL_ROOMS = (("runtime",), ("experts", "gemm", "router"), ("decode", "layer", "plan"), ("network",), ("aot",))
MAX_FOLDER, MAX_TEST_FOLDER = 14, 20  # files of Python
# Folders of tests are those of the code, but for these.
TESTS_OF_ALL = {"failures", "harness", "house", "support"}  # tests of several folders, or of tests
TESTED_ELSEWHERE = {"jobs"}  # settings of jobs, whose every field has tests in house/test_configs.py and launch
MAX_FILE, MAX_FUNCTION, MAX_KERNEL, MAX_PARAMETERS, MAX_JIT_PARAMETERS = 500, 80, 150, 10, 15
SHORT_FUNCTION = 3  # lines of a body that needs no docstring

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the root, text and tree."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        return cls(path, text, ast.parse(text))

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]

    def at(self, node: ast.AST, message: str) -> str:
        return f"{self.path}:{node.lineno}: {message}"  # type: ignore[attr-defined]


@functools.cache
def all_sources() -> list[Source]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [Source.parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def module_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run on import: everything outside functions and outside ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from module_scope(child)


def imported(node: ast.AST, path: str) -> list[str]:
    """Dotted names an import statement may load (a ``from`` import counts each name as a possible module)."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = path.split("/")[:-1]
        package = ["comet", *package] if package[0] in ("kernels", "launch") else package
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def import_direction(source: Source) -> list[str]:
    found = []
    for node in ast.walk(source.tree):
        for name in imported(node, source.path):
            if within(name, "kernels") or within(name, "launch"):
                found.append(source.at(node, f"imports {name}: the import name is comet.{name.split('.')[0]}"))
            if source.folder == "kernels" and within(name, "comet.kernels"):
                continue
            if any(within(name, package) for package in FORBIDDEN[source.folder]):
                found.append(source.at(node, f"{source.folder} imports {name}"))
            third_party = name.split(".")[0] not in (*sys.stdlib_module_names, "comet", "torch", "triton")
            is_binding = source.path == BINDINGS_IN and within(name, BINDINGS)
            if source.folder == "kernels" and third_party and not is_binding:
                found.append(source.at(node, f"kernels import only torch and triton, not {name}"))
    return found


def room_of(name: str) -> tuple[int, int, str] | None:
    """Which of the two houses a dotted name is in, the row there, and the room; comet itself is in none."""
    parts = name.split(".")
    is_kernel = parts[:2] == ["comet", "kernels"] and len(parts) > 3
    rooms, room = (KERNEL_ROOMS, parts[2]) if is_kernel else (ROOMS, parts[1] if len(parts) > 1 else "")
    return next(((int(is_kernel), row, room) for row, names in enumerate(rooms) if room in names), None)


def arrows(source: Source) -> list[str]:
    """Find imports of rooms that are not in a row below, and rooms that no row names."""
    if source.folder not in LIBRARY or source.path == "comet/__init__.py":
        return []
    own = room_of(module_name(source.path) + "._" * (source.folder == "kernels"))
    if own is None:
        return [] if source.path == "kernels/__init__.py" else [f"{source.path}: is in none of the rooms of this test"]
    found = []
    for node in ast.walk(source.tree):
        for name in imported(node, source.path):
            other = room_of(name)
            if other is not None and other[0] == own[0] and other[2] != own[2] and other[1] >= own[1]:
                found.append(source.at(node, f"{own[2]} imports {name}, which is not below it"))
    return found


def module_name(path: str) -> str:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join([*([] if parts[0] == "comet" else ["comet"]), *parts])


def circle(sources: Iterable[Source]) -> list[str]:
    """Return modules of which each imports the next, be it in a function or for types; empty: there are none."""
    by_name = {module_name(source.path): source for source in sources if source.folder in LIBRARY}
    graph: dict[str, set[str]] = {}
    for module, source in by_name.items():
        names = {name for node in ast.walk(source.tree) for name in imported(node, source.path)}
        found = {name if name in by_name else name.rpartition(".")[0] for name in names}
        graph[module] = {name for name in found if name in by_name and name != module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        modules: list[str] = error.args[1]
        return modules
    return []


def optional_imports(source: Source) -> list[str]:
    if source.folder not in ("comet", "kernels"):
        return []
    return [
        source.at(node, f"imports optional {name} at module scope")
        for node in module_scope(source.tree)
        for name in imported(node, source.path)
        if name.split(".")[0] in OPTIONAL
    ]


def functions(source: Source) -> Iterator[Function]:
    return (node for node in ast.walk(source.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def is_jit(function: Function) -> bool:
    return any(re.search(r"\bjit\b", ast.unparse(decorator)) for decorator in function.decorator_list)


def sizes(source: Source) -> list[str]:
    found = []
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_FILE:
        found.append(f"{source.path}: {num_lines} lines, at most {MAX_FILE}")
    for function in functions(source):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        limit = MAX_KERNEL if is_jit(function) else MAX_FUNCTION
        if length > limit:
            found.append(source.at(function, f"{function.name} has {length} lines, at most {limit}"))
        arguments = function.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
        most = MAX_JIT_PARAMETERS if is_jit(function) else MAX_PARAMETERS  # a constexpr is one, too
        if count > most:
            found.append(source.at(function, f"{function.name} has {count} parameters, at most {most}"))
    return found


def public(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public functions and classes of a module and public or special methods of its public classes."""
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        special = owner and re.fullmatch(r"__\w+__", node.name)
        if node.name.startswith("_") and not special:
            continue
        yield f"{owner}{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from public(node.body, f"{owner}{node.name}.")


def is_short(node: Function | ast.ClassDef) -> bool:
    """Whether a function is as quickly read as a docstring: its name may say all."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return not isinstance(node, ast.ClassDef) and (body[-1].end_lineno or 0) - body[0].lineno < SHORT_FUNCTION


def documented(source: Source) -> list[str]:
    if source.folder not in LIBRARY:
        return []
    found = [] if ast.get_docstring(source.tree) else [f"{source.path}: module has no docstring"]
    for name, node in public(source.tree.body):
        if not node.name.startswith("__") and not ast.get_docstring(node) and not is_short(node):
            found.append(source.at(node, f"{name} has no docstring"))
        if not isinstance(node, ast.ClassDef) and node.returns is None and not is_jit(node):
            found.append(source.at(node, f"{name} has no return annotation"))
    return found


def comments(source: Source) -> list[str]:
    """A TODO names its issue, and everything is ASCII."""
    unnamed = [
        f"{source.path}:{token.start[0]}: {token.string!r} names no issue, as in TODO(#12)"
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))", token.string)
    ]
    lines = enumerate(source.text.splitlines(), 1)
    return unnamed + [f"{source.path}:{number}: not ASCII" for number, line in lines if not line.isascii()]


def gpu_tests(source: Source) -> list[str]:
    """Tests that need GPUs are in files named ``*_gpu.py``, all others are not: ``tests/conftest.py`` goes by that."""
    path = Path(source.path)
    if source.folder != "tests" or not path.name.startswith("test_"):
        return []
    names = {ast.unparse(node) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    needs_gpu, is_named = bool(names & {"pytest.mark.gpu", "pytest.mark.multi_gpu"}), path.stem.endswith("_gpu")
    if needs_gpu and not is_named:
        return [f"{source.path}: has tests marked gpu or multi_gpu: its name must end with _gpu.py"]
    return [f"{source.path}: has no test marked gpu or multi_gpu"] if is_named and not needs_gpu else []


RULES = (import_direction, arrows, optional_imports, sizes, documented, comments, gpu_tests)


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: Callable[[Source], list[str]]) -> None:
    violations = [message for source in all_sources() for message in rule(source)]
    assert not violations, f"{len(violations)} violations:\n" + "\n".join(violations)


def test_no_files_import_each_other() -> None:
    assert circle(all_sources()) == []


def test_circle_finds_imports_in_functions_and_for_types() -> None:
    texts = {"comet/a.py": "from . import b", "comet/b.py": "if TYPE_CHECKING:\n from .c.d import D"}
    last = "def f():\n from comet.a import A"
    assert circle(Source.parse(*each) for each in texts.items()) == []
    found = circle(Source.parse(*each) for each in (texts | {"comet/c/d.py": last}).items())
    assert set(found) == {"comet.a", "comet.b", "comet.c.d"}


def test_folders_can_be_read_at_a_glance() -> None:
    for roots, most in ((LIBRARY, MAX_FOLDER), (("tests",), MAX_TEST_FOLDER)):
        folders = Counter(str(Path(source.path).parent) for source in all_sources() if source.folder in roots)
        assert {folder: count for folder, count in folders.items() if count > most} == {}


def folders_below(folder: str, pattern: str) -> set[str]:
    """The folders right below one that have such a file, however deep; names relative to it."""
    below = ROOT / folder
    return {path.relative_to(below).parts[0] for path in below.rglob(pattern) if path.parent != below}


def test_every_folder_of_code_has_its_folder_of_tests() -> None:
    code, kernels = (folders_below(folder, "*.py") for folder in ("comet", "kernels"))
    expected = (code - TESTED_ELSEWHERE) | {"kernels", "launch", "benchmarks"}
    assert folders_below("tests", "test_*.py") - TESTS_OF_ALL == expected
    assert folders_below("tests/kernels", "test_*.py") == kernels


def test_a_name_of_a_test_file_stands_for_one_file() -> None:
    """Messages, ``-k`` and documents name files without folders; documents name no file that is missing."""
    paths = [path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    names = Counter(Path(path).name for path in paths)
    assert {name: count for name, count in names.items() if count > 1} == {}
    for document in ("README.md", "CONTRIBUTING.md", "COMPATIBILITY.md"):
        named = re.findall(r"(?<!\w)(?:tests/)?((?:\w+/)*test_\w+\.py)", (ROOT / document).read_text(encoding="utf-8"))
        assert set(named) - set(paths) - set(names) == set(), document


LONG = "def f() -> None:\n" + "    pass\n" * 90


@pytest.mark.parametrize(
    ("rule", "path", "text", "expected"),
    [
        (import_direction, "kernels/a.py", "from comet.layer.plan import Plan", "imports comet.layer.plan.Plan"),
        (import_direction, "kernels/a.py", "from .. import moe", "kernels imports comet.moe"),
        (import_direction, "kernels/a.py", "from comet.kernels import tiles\nfrom . import tiles\nimport math", None),
        (import_direction, BINDINGS_IN, "def f():\n from cuda import core", "and triton, not cuda.core"),
        (import_direction, BINDINGS_IN, "def f():\n from cuda.bindings import driver, nvrtc", None),
        (import_direction, "tests/a.py", "import kernels.tiles", "the import name is comet.kernels"),
        (import_direction, "launch/a.py", "from tests.ranks import run_ranks", "launch imports tests.ranks"),
        (arrows, "comet/comm/a.py", "def f():\n from comet.layer.plan import Plan", "imports comet.layer.plan.Plan"),
        (arrows, "comet/decode/a.py", "from comet import moe", "decode imports comet.moe, which is not below it"),
        (arrows, "comet/layer/a.py", "from .plan import Plan\nfrom ..kernels.gemm.tiles import tile_of", None),
        (arrows, "comet/a.py", "import comet", "comet/a.py: is in none of the rooms"),
        (arrows, "kernels/gemm/a.py", "from ..layer.dispatch_gemm import run", "gemm imports comet.kernels.layer"),
        (arrows, "launch/cli.py", "from comet.generation.job import generate_job", None),
        (optional_imports, "comet/a.py", "try:\n import hydra.core\nexcept ImportError:\n pass", "hydra.core"),
        (optional_imports, "comet/a.py", "if TYPE_CHECKING:\n import megatron\ndef f():\n import matplotlib", None),
        (optional_imports, BINDINGS_IN, "try:\n import cuda.bindings.nvrtc\nexcept ImportError:\n pass", "nvrtc at"),
        (import_direction, "comet/a.py", "def f():\n from cuda.bindings import driver", "imports cuda.bindings.driver"),
        (sizes, "comet/a.py", LONG, "f has 91 lines, at most 80"),
        (sizes, "kernels/a.py", "@triton.jit(debug=True)\n" + LONG, None),
        (sizes, "comet/a.py", "x = 1\n" * 501, "501 lines, at most 500"),
        (sizes, "comet/a.py", "def f(a,b,c,d,e,f,g,h,i,j,*,k): pass", "f has 11 parameters"),
        (sizes, "kernels/a.py", "@gluon.jit\ndef f(a,b,c,d,e,f,g,h,i,j,k): pass", None),
        (
            sizes,
            "kernels/a.py",
            "@gluon.jit\ndef f(a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,P: tl.constexpr): pass",
            "has 16 parameters",
        ),
        (
            documented,
            "comet/a.py",
            '"""A."""\nclass A:\n """A."""\n def f(self) -> int:\n  a = 1\n  b = 2\n  c = 3\n  return a + b + c',
            "A.f has no docstring",
        ),
        (documented, "comet/a.py", '"""A."""\nclass A:\n """A."""\n def f(self) -> int: ...', None),
        (documented, "comet/a.py", '"""A."""\ndef _f(): ...\nclass _A: ...', None),
        (documented, "launch/a.py", "x = 1", "module has no docstring"),
        (documented, "kernels/a.py", '"""A."""\n@triton.jit\ndef f():\n """F."""', None),
        (gpu_tests, "tests/a/test_b.py", "@pytest.mark.multi_gpu(n=2)\ndef test(): ...", "must end with _gpu.py"),
        (gpu_tests, "tests/a/test_b_gpu.py", "def test(): ...", "has no test marked gpu"),
        (comments, "comet/a.py", "x = 1  # " + "TODO later", "names no issue"),
        (comments, "comet/a.py", "x = 1  # " + "TODO(#7) later\ny = 'TODO'", None),
        (comments, "comet/a.py", "x = '\u00b5s'", "not ASCII"),
    ],
)
def test_rule_catches(rule: Callable[[Source], list[str]], path: str, text: str, expected: str | None) -> None:
    found = rule(Source.parse(path, text))
    if expected is None:
        assert not found
    else:
        assert any(expected in message for message in found), found


def test_importing_comet_is_silent_and_needs_nothing_optional_nor_torch() -> None:
    code = f"import sys, comet; sys.stderr.write(' '.join({{'torch', *{OPTIONAL!r}}} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "", "import comet must print nothing"
    assert child.stderr == "", f"import comet printed or imported: {child.stderr}"
