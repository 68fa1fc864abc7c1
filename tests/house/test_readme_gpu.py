"""README's snippets on GPUs."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hf_cases import save_model
from readme import snippets


def run(command: Sequence[str]) -> str:
    """Run Python on the GPUs there are; its output."""
    done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gpu
def test_the_snippets_in_one_process_run_in_turn():
    program = [snippet for section in ("In a program", "Decode") for snippet in snippets(section)]
    assert run(["-c", "\n".join([*program, "group.close()"])]).startswith("torch.Size([100, 64]) ")


@pytest.mark.multi_gpu(n=2, own=True)
@pytest.mark.parametrize("section", ["Over several ranks", "Hugging Face", "Megatron-core"])
def test_the_snippets_over_ranks_run(section: str, tmp_path: Path):
    if section == "Megatron-core":
        pytest.importorskip("megatron.core")
    save_model(tmp_path / "model", "qwen3_moe")
    (script := tmp_path / "script.py").write_text("".join(snippets(section)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run([*torchrun, str(script), str(tmp_path / "model")])
    assert section != "Hugging Face" or re.search(r"tensor\(\[\[ *1, +2, +3,", out)
