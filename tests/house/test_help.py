"""The pages of help: every setting with default and meaning, from one source, and the first page at once."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf

from comet.launch.cli import main
from comet.launch.config import job_schema
from comet.launch.help import arguments_of, help_page, task_page
from comet.launch.schema import setting_names
from comet.launch.tasks.registry import TASKS
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
    assert len(done.stdout.splitlines()) < 45


def test_entries_of_a_docstring() -> None:
    entries = "    a: One, ``None`` for\n        none: really.\n    b: ``Two``."
    doc = f"Summary.\n\nArgs:\n{entries}\n\nRaises:\n    E: never."
    assert arguments_of(doc) == {"a": "One, null for none: really.", "b": "Two."}
    assert arguments_of("Summary.") == {}


def test_a_page_shows_default_choices_and_meaning() -> None:
    page = task_page("train", TASKS["train"])
    assert "\n  train.steps=800\n      Optimizer steps in all, those before a resume included.\n" in page
    assert "\n  train.dtype=auto  (auto, float32, bfloat16)\n" in page
    assert "\n  comm.timeout_s=60.0\n      Deadline of every wait for another rank, in seconds.\n" in page
    assert "  overlap: settings\n      Split and order of the fused kernels' work; null takes what was measured" in page
    assert "output_dir=outputs/sweep-" in task_page("sweep", TASKS["sweep"])
    assert "\n  sweep.comm_blocks=[0,4,8,16,32,64]\n" in task_page("sweep", TASKS["sweep"])


def test_every_setting_is_on_a_page_with_its_meaning() -> None:
    pages = {name: task_page(name, task) for name, task in TASKS.items() if task.dry_run}
    assert all(f"\n  comet {name} " in page or f"\n  comet {name}\n" in page for name, page in pages.items())
    shown = {}
    for page in pages.values():
        shown |= re.findall(r"^  ([a-z_0-9.]+)[=:].*\n((?:      .*\n)*)", page, re.MULTILINE)
    names = set(setting_names(OmegaConf.to_container(OmegaConf.structured(job_schema()))))
    assert sorted(names - shown.keys()) == [], "to be added to what a task `reads` in launch/tasks/registry.py"
    assert [name for name in names if not shown[name]] == [], "to be explained in the docstring of its dataclass"


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
