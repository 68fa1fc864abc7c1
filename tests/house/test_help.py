"""The pages of help: every setting with default and meaning, from one source; and packages that are not installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch_jobs import TIMEOUT_S, environment
from tiers import slow

from comet.launch.cli import main
from comet.launch.help import arguments_of, help_page, task_page
from comet.launch.messages import is_user_error, one_line
from comet.launch.schema import defaults_of
from comet.launch.tasks.registry import TASKS, imported
from comet.training.saved_settings import flat
from comet.version import comet_commit, comet_version

QUICK = """
import sys
from comet.launch.cli import main
assert main(["--help"]) == 0
sys.exit(", ".join({"torch", "hydra", "omegaconf", "yaml", "comet.config"} & sys.modules.keys()) or 0)
"""


def test_the_first_page_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", QUICK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == help_page(TASKS)
    for listed in (*(f"  {name} " for name in TASKS), "model=deepseek_v3|", "--dry-run"):
        assert listed in done.stdout
    assert len(done.stdout.splitlines()) < 45


def test_entries_of_a_docstring() -> None:
    entries = "    a: One, ``None`` for\n        none: really.\n    b: ``Two``."
    doc = f"Summary.\n\nArgs:\n{entries}\n\nRaises:\n    E: never."
    assert arguments_of(doc) == {"a": "One, null for none: really.", "b": "Two."}
    assert arguments_of("Summary.") == {}


def test_a_page_shows_default_choices_and_meaning() -> None:
    page = task_page("train", TASKS["train"])
    assert "\n  train.steps=800  (at least 1)\n      Optimizer steps in all, those before a resume included.\n" in page
    assert "\n  train.dtype=auto  (one of auto, float32, bfloat16)\n" in page
    assert "\n  comm.timeout_s=60.0  (above 0 and at most 1000000)\n      Deadline of every wait for another" in page
    assert "\n  overlap.comm_blocks=null  (at least 0)\n" in page
    assert "output_dir=outputs/sweep-" in task_page("sweep", TASKS["sweep"])
    assert "\n  sweep.comm_blocks=[0,4,8,16,32,64]  (each at least 0)\n" in task_page("sweep", TASKS["sweep"])


def test_every_setting_is_on_a_page_with_its_meaning() -> None:
    for name, task in TASKS.items():
        if task.settings:
            page = task_page(name, task)
            assert f"\n  comet {name} " in page or f"\n  comet {name}\n" in page
            shown = dict(re.findall(r"^  ([a-z_0-9.]+)[=:].*\n((?:      .*\n)*)", page, re.MULTILINE))
            assert flat(defaults_of(imported(task.settings))).keys() == shown.keys()
            unexplained = [name for name, meaning in shown.items() if not meaning]
            assert unexplained == [], "to be explained in the docstring of its dataclass"


@pytest.mark.parametrize("words", [["--version"]])
def test_version_names_what_it_runs_on_and_touches_no_gpu(words, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("a GPU was initialised"))
    assert main(words) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"comet {comet_version()}")
    assert f"torch {torch.__version__}, triton " in line
    assert "CUDA " in line
    commit = comet_commit()
    assert f"(commit {commit})" in line if commit else "commit" not in line


def run_without(package: str, folder: Path, *words: str) -> tuple[int, str, str]:
    """The command where importing a package fails as if it were not there, in ranks as well."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(f"raise ModuleNotFoundError('none', name={package!r})\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "comet.launch", *words], env={**environment(), "PYTHONPATH": path},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=folder,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("triton", ["compile"]),
        slow("triton", ["train", "nproc=1", "moe_path=fused", "data.path=text"]),
        slow("matplotlib", ["train", "nproc=1"]),
        slow("matplotlib", ["sweep", "nproc=1"]),
    ],
)
def test_a_missing_package_is_one_line(package: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    status, out, err = run_without(package, tmp_path, *words)
    assert (status, out) == (2, "")
    *before, last = err.splitlines()
    assert last == f"comet: error: the package '{package}' is not installed: pip install {package}"
    assert "Traceback" not in err
    assert not before or package == "triton", "nothing was trained or measured"


def test_a_module_of_comet_that_is_missing_is_a_fault_of_comet() -> None:
    assert not is_user_error(ModuleNotFoundError("No module named 'comet.gone'", name="comet.gone"))
    missing = ModuleNotFoundError("No module named 'torch.x'", name="torch.x")
    assert is_user_error(missing)
    assert one_line(missing) == "the package 'torch' is not installed: pip install torch"


def test_what_is_not_built_yet_is_one_line() -> None:
    refusal = NotImplementedError("expert_budget needs warp decode on all ranks: two nodes")
    assert is_user_error(refusal)
    assert one_line(refusal) == str(refusal)
    assert not is_user_error(NotImplementedError()), "an abstract method that was called"
