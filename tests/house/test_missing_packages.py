"""A package that is not installed is one line, and comes before work that needs it; real processes without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_jobs import TIMEOUT_S, environment
from tiers import slow

from comet.launch.failures import is_user_error, one_line


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
        ("matplotlib", ["train", "nproc=1"]),
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
