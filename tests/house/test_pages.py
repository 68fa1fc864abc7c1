"""The pages for readers: their programs run, their commands parse, and links, files and names in them exist."""

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from forked import completed
from hf_cases import save_model
from launch_jobs import TIMEOUT_S, environment
from pages import PAGES, ROOT, commands, fences, program, text_of

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ALONE = (
    "README.md", "docs/tutorial/first-layer.md", "docs/howto/cuda-graphs.md", "docs/howto/decode.md",
    "docs/howto/vllm.md",
)  # fmt: skip
OVER_RANKS = ("docs/tutorial/two-ranks.md", "docs/howto/own-loop.md", "docs/howto/placement.md")
OF_A_FOLDER = ("docs/howto/hugging-face.md", "docs/howto/expert-memory.md")
INTERPRETED = ("docs/tutorial/kernel-change.md",)
ELSEWHERE = (  # integrations/megatron/test_megatron.py, generation/test_export.py
    "docs/howto/megatron.md", "docs/howto/own-text.md",
)  # fmt: skip
FOLDER = "path/to/Qwen3-30B-A3B"
SHELL = {"export", "source", "git"}  # words of a command that is no program of Comet


def run(page: str, tmp_path: Path, *before: str, interpret: bool = False) -> str:
    """Run the program of a page without a warning; what it prints."""
    (file := tmp_path / "program.py").write_text(program(page).replace(FOLDER, str(tmp_path / "model")))
    env = environment() | {"TRITON_INTERPRET": "1"} if interpret else environment()
    done = completed([sys.executable, *before, str(file), str(tmp_path / "model")], env, TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "arning" not in done.stderr, done.stderr
    return done.stdout


def test_every_program_is_run():
    known = (*ALONE, *OVER_RANKS, *OF_A_FOLDER, *INTERPRETED, *ELSEWHERE)
    assert {page for page in PAGES if fences(page, "python")} == set(known)


@pytest.mark.parametrize("page", ALONE)
def test_programs_of_one_process_run(page: str, tmp_path: Path):
    run(page, tmp_path)


@pytest.mark.parametrize("page", OVER_RANKS)
def test_programs_over_ranks_print_what_the_page_says(page: str, tmp_path: Path):
    printed = re.sub(r"\d\.\d+", "N", run(page, tmp_path, *TORCHRUN))
    assert printed == re.sub(r"\d\.\d+", "N", "".join(fences(page, "text")[:1]))


@pytest.mark.slow
def test_the_timeline_shows_the_panels_that_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (page,) = INTERPRETED
    before, _ = fences(page, "text")
    assert run(page, tmp_path, *TORCHRUN, interpret=True).startswith(before)
    assert (tmp_path / "outputs/timeline/timeline.png").exists()


@pytest.mark.slow
def test_the_program_for_hugging_face_generates_what_transformers_does(tmp_path: Path):
    model = save_model(tmp_path / "model", "qwen3_moe")
    out = run("docs/howto/hugging-face.md", tmp_path, *TORCHRUN)
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=64)
    assert [int(number) for number in re.findall(r"\d+", out.split("device=")[0])] == expected.flatten().tolist()


@pytest.mark.slow
def test_the_program_with_a_budget_runs(tmp_path: Path):
    save_model(tmp_path / "model", "qwen3_moe")
    run("docs/howto/expert-memory.md", tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_diffs_apply(page: str, tmp_path: Path):
    for number, block in enumerate(fences(page, "diff")):
        (file := tmp_path / f"{number}.diff").write_text(block)
        done = subprocess.run(["git", "apply", "--check", str(file)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{page}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str):
    wrong = {line: reason for line in commands(page) if (reason := mistake(page, line))}
    assert wrong == {}


def mistake(page: str, line: str) -> str:
    """Return why a command of a page cannot work; house/test_configs.py composes those of ``comet``."""
    words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if not words or words[0] in SHELL or words[0] == "comet" or "comet.launch" in words:
        return ""
    if "torchtitan.train" in words:  # integrations/torchtitan/test_torchtitan.py parses it
        return ""
    if words[0] == "make":
        targets = re.findall(r"^([a-z%-]+):", text_of("Makefile"), re.MULTILINE)
        return ", ".join(word for word in words[1:] if "=" not in word and not is_target(word, targets))
    if words[0] == "pytest" or words[1:3] == ["-m", "pytest"]:
        return ", ".join(word for word in words if "/" in word and not (ROOT / word).exists())
    programs = [index for index, word in enumerate(words) if word.endswith(".py")]
    if not programs:
        return "is no command that this test knows"
    file, options = words[programs[0]], words[programs[0] + 1 :]
    if file == "benchmarks/bench.py":
        return benchmark_mistake(options)
    return "" if (ROOT / file).exists() or f"Save this as `{file}`" in text_of(page) else f"{file} is not there"


def is_target(word: str, targets: list[str]) -> bool:
    return any(fnmatch(word, target.replace("%", "*")) for target in targets)


def benchmark_mistake(words: list[str]) -> str:
    try:
        importlib.import_module(f"suites.{words[0].replace('-', '_')}").Run.parse(words[1:])
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_links_files_and_names_exist(page: str):
    text, here = text_of(page), (ROOT / page).parent
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if not is_there(here, page, target)] == []
    files = re.findall(r"`((?:comet|kernels|launch|configs|tests|benchmarks|docs)/[\w/.-]+)`", text)
    assert [name for name in files if not (ROOT / name).exists() and not name.endswith("NAME")] == []
    tests = {path.name for path in ROOT.glob("tests/**/test_*.py")}
    assert set(re.findall(r"\btest_\w+\.py", text)) - tests == set()
    names = {name for name in re.findall(r"`(comet(?:\.\w+)+)", text) if not name.endswith(".yaml")}
    assert sorted(name for name in names if not resolves(name)) == []


def is_there(here: Path, page: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (here / path).resolve() if path else ROOT / page
    headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor and file.exists() else []
    anchors = {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings}
    return file.exists() and (not anchor or anchor in anchors)


def resolves(name: str) -> bool:
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_first_pages_are_short():
    assert len(text_of("README.md").splitlines()) <= 200
    assert len(text_of("CONTRIBUTING.md").splitlines()) <= 90


def test_the_picture_of_the_plan_is_what_is_planned():
    folder = ROOT / "docs/explanation"
    assert runpy.run_path(str(folder / "plan_picture.py"))["picture"]() == (folder / "plan.svg").read_text()


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path):
    pytest.importorskip("furo", reason="needs pip install 'comet-moe[docs]'")
    options = ["-E", "-q", "-W", "--keep-going", "-c", "docs", "-d", str(tmp_path / "cache")]
    command = [sys.executable, "-P", "-m", "sphinx", *options, ".", str(tmp_path / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
