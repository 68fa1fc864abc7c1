"""The programs of the pages on GPUs."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hf_cases import save_model
from pages import program


def run(command: Sequence[str]) -> str:
    """Run Python on the GPUs there are; its output."""
    done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("page", ["README", "docs/tutorial/first-layer", "docs/howto/cuda-graphs", "docs/howto/decode"])
def test_programs_of_one_process_run(page: str):
    run(["-c", program(f"{page}.md")])


@pytest.mark.multi_gpu(n=2, own=True)
@pytest.mark.parametrize(
    "page", ["tutorial/two-ranks", "tutorial/kernel-change", "howto/own-loop", "howto/hugging-face", "howto/megatron"]
)
def test_programs_over_ranks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if page == "howto/megatron":
        pytest.importorskip("megatron.core")
    save_model(tmp_path / "model", "qwen3_moe")
    (script := tmp_path / "script.py").write_text(program(f"docs/{page}.md"))
    monkeypatch.chdir(tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run([*torchrun, str(script), str(tmp_path / "model")])
    assert page != "howto/hugging-face" or re.search(r"tensor\(\[\[ *1, +2, +3,", out)
