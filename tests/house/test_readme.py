"""README: its snippets run as they stand, one after the other, and its links resolve wherever it is shown."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_cases import save_model
from launch_jobs import TIMEOUT_S, environment
from readme import README, snippets

IN_ONE_PROCESS = ("In a program", "Decode")
# layer/test_replicas.py and integrations/megatron/test_megatron.py run the first and the last of these.
OVER_RANKS = ("Over several ranks", "Hugging Face", "Megatron-core")


def test_the_snippets_in_one_process_run_in_turn_and_print_no_warning():
    program = "\n".join([snippet for section in IN_ONE_PROCESS for snippet in snippets(section)] + ["group.close()"])
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("torch.Size([100, 64]) ")


@pytest.mark.slow
def test_the_snippet_over_ranks_generates_what_transformers_does(tmp_path: Path):
    model = save_model(tmp_path / "model", "qwen3_moe")
    (tmp_path / "generate.py").write_text("".join(snippets("Hugging Face")))
    torchrun = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(tmp_path / "generate.py"), str(tmp_path / "model")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=64)
    found = [int(number) for number in re.findall(r"\d+", done.stdout.split("device=")[0])]
    assert found == expected.flatten().tolist()


def test_every_snippet_is_run():
    run = [snippet for section in (*IN_ONE_PROCESS, *OVER_RANKS) for snippet in snippets(section)]
    assert len(run) == README.read_text().count("```python\n")


def test_links_resolve_wherever_readme_is_shown():
    """Package indexes show README without the files around it, so links lead to headings of its own."""
    text = README.read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets
    assert {target for target in targets if target.removeprefix("#") not in headings or target[0] != "#"} == set()


def test_files_that_readme_names_exist():
    named = re.findall(r"`((?:comet|kernels|launch|configs|tests|benchmarks)/[\w/.]+)`", README.read_text())
    assert [name for name in named if not (README.parent / name).exists()] == []
