"""The package as others get it: metadata, files, imports from the wrong folder, and a wheel that runs elsewhere."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hf_cases import save_model
from pages import program

import comet

ROOT = Path(__file__).parents[2]
FOLDERS = {"comet": "comet", "kernels": "comet/kernels", "launch": "comet/launch", "configs": "comet/configs"}
DATA = {".cu", ".cuh", ".yaml", ".csv", ".typed"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = "import sys, setuptools.build_meta as build; getattr(build, f'build_{sys.argv[1]}')(sys.argv[2])"


def package_files() -> dict[Path, str]:
    """Map each file of the package to the name that the wheel must give it."""
    return {
        path: str(Path(package, path.relative_to(ROOT / folder)))
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", *DATA} and "__pycache__" not in path.parts
    }


def test_every_folder_is_listed_for_installation():
    found = {str(Path(name).parent).replace("/", ".") for name in package_files().values()} | {
        "comet.kernels.cuda.include"
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_the_metadata_name_licence_authors_and_version():
    project = PROJECT["project"]
    assert project["license"] == "Apache-2.0"
    assert project["authors"] == [{"name": "The Comet authors"}]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(project["classifiers"])
    assert "urls" not in project, "there are none yet"
    assert comet.__version__ == project["version"] == importlib.metadata.version("comet-moe")
    assert f"## {comet.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def run_python(*arguments: str, folder: Path, path: str = "") -> tuple[int, str]:
    """Run Python in a folder; its status and the last line of standard error."""
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr.strip().split("\n")[-1]


@pytest.mark.parametrize("line", ["from comet import MoE", "import comet.kernels", "from comet.integrations import hf"])
def test_a_script_beside_the_clone_is_told_what_to_install_and_where_to_start(tmp_path, line):
    (tmp_path / "comet").symlink_to(ROOT)
    (tmp_path / "script.py").write_text(line)
    status, message = run_python("script.py", folder=tmp_path)
    assert (status, message) == (
        1,
        f"ImportError: {ROOT} is the source of Comet and hides the installed package: install it with `pip install -e "
        f"{ROOT}`, then start Python with -P, or move the script out of {ROOT.parent}",
    )


def test_python_with_the_advised_option_finds_the_installed_package(tmp_path):
    (tmp_path / "comet").symlink_to(ROOT)
    assert run_python("-P", "-c", "from comet import StepFailedError", folder=tmp_path) == (0, "")


@pytest.mark.parametrize("line", ["import comet", "from comet.integrations import hf"])
def test_a_checkout_that_hides_a_wheel_is_told_what_to_install_and_where_to_start(line):
    packages = sysconfig.get_paths()["purelib"]  # without its .pth files, which -S leaves out, Comet is not installed
    status, message = run_python("-S", "-c", line, folder=ROOT, path=packages)
    assert (status, message) == (
        1,
        f"ImportError: {ROOT} is the source of Comet, not the installed package: install it with `pip install -e "
        f"{ROOT}`, or use another installation: start Python with -P, or outside {ROOT}",
    )


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a wheel or an sdist without a warning; return the file."""
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # distutils warns if it is set
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    (built,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist of the files that git tracks, built in a copy."""
    folder = tmp_path_factory.mktemp("built")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            copy = folder / "source" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    return build("wheel", folder / "source", folder), build("sdist", folder / "source", folder)


def contents(wheel: Path) -> dict[str, bytes]:
    """Files of a wheel, but for its list of them."""
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("/RECORD")}


@pytest.mark.slow
def test_wheel_and_sdist_are_complete_and_built_without_a_warning(distributions, tmp_path):
    wheel, sdist = distributions
    built = contents(wheel)
    metadata = {name for name in built if ".dist-info/" in name}
    assert built.keys() - metadata == set(package_files().values())
    (license_file,) = (name for name in metadata if name.endswith("licenses/LICENSE"))
    assert built[license_file] == (ROOT / "LICENSE").read_bytes()
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    copied = {path.relative_to(source) for path in source.rglob("*")}
    original = wheel.parent / "source"
    tracked = {path.relative_to(original) for path in original.rglob("*") if ".egg-info" not in str(path)}
    assert {path for path in tracked - copied if path.parts[0] != "build"} == set()
    (tmp_path / "again").mkdir()
    assert contents(build("wheel", source, tmp_path / "again")) == built


@pytest.fixture(scope="module")
def elsewhere(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel, which finds torch and the rest where this one does."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv/bin/python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(distributions[0])], check=True, timeout=120)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "machine.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder


def run_elsewhere(folder: Path, command: Sequence[str]) -> str:
    """Run a program of the environment in that folder without GPUs; its output."""
    libraries = [str(found) for path in sys.path for found in Path(path).glob("nvidia/*/lib")]  # nvrtc
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "CUDA_VISIBLE_DEVICES": "",
        "LD_LIBRARY_PATH": ":".join(libraries),
    }
    program = str(folder / "venv/bin" / command[0])
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_trains_and_compiles_elsewhere(elsewhere):
    where = run_elsewhere(elsewhere, ["python", "-c", "import comet.kernels as found; print(found.__file__)"])
    assert where.startswith(str(elsewhere))
    words = ["train.steps=2", "train.eval_batches=1", "train.sample_bytes=4", "output_dir=run"]
    assert '"steps": 2' in run_elsewhere(elsewhere, ["comet", "train", *words]).splitlines()[-1]
    assert (elsewhere / "run/loss.png").exists()
    assert '"failed": 0' in run_elsewhere(elsewhere, ["comet", "compile", "--filter", "Mixtral, EP4"]).splitlines()[-1]
    assert '"failed": 0' in run_elsewhere(elsewhere, ["comet", "compile", "--filter", "gemm_combine_bf16_top2_rows256"])


@pytest.mark.slow
def test_the_wheel_runs_the_programs_of_the_pages_elsewhere(elsewhere):
    run_elsewhere(elsewhere, ["python", "-c", program("docs/howto/decode.md")])
    assert "torch.Size([100, 64])" in run_elsewhere(elsewhere, ["python", "-c", program("README.md")])
    torchrun = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (elsewhere / "train.py").write_text(program("docs/howto/own-loop.md"))
    run_elsewhere(elsewhere, [*torchrun, "train.py"])
    (elsewhere / "generate.py").write_text(program("docs/howto/hugging-face.md"))
    save_model(elsewhere / "model", "qwen3_moe")
    assert "tensor([[" in run_elsewhere(elsewhere, [*torchrun, "generate.py", "model"])
