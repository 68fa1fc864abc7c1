"""How every benchmark starts: its ranks, its words on the command line, and what a mistake on it becomes."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import bench
import pytest
from bench_cases import ALONE, CPU, ROOT, run_bench

from comet.launch.distributed import LaunchContext

import lib.ranks
import suites.timeline


def test_a_mistake_is_one_line_of_rank_0() -> None:
    done = run_bench("moe", "--ep", "3", "--device", "cpu", torchrun=True)
    said = [line for line in done.stderr.splitlines() if "comet: " in line]
    assert said == ["comet: error: nproc=2 must equal ep x tp = 3"]
    assert "ValueError" not in done.stderr
    assert re.findall(r"rank +: 0 .*\n +exitcode +: (-?\d+) ", done.stderr) == ["2"]


def test_the_list_of_suites_imports_nothing_heavy() -> None:
    code = "import sys, bench; print(bench.overview()); sys.exit('torch' in sys.modules)"
    command, folder = [sys.executable, "-c", code], ROOT / "benchmarks"
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    lines = dict(re.findall(r"^    ([a-z-]+)  +(.*)", done.stdout, re.MULTILINE))
    assert list(lines) == sorted(bench.suite_files())
    assert all(len(line) < 110 and line.endswith((".", "?")) for line in lines.values())


def test_an_unknown_suite_is_named() -> None:
    with pytest.raises(ValueError, match="suite='rooter' must be one of compare-trees, decode, experts, "):
        bench.main(["rooter", "--ep", "2"])


@pytest.mark.parametrize("suite", bench.suite_files())
def test_every_suite_has_help(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench.main([suite, "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert text.startswith(f"usage: bench.py {suite} ")
    assert f"benchmarks/bench.py {suite} " in text, "there is an example"


def test_imports_of_benchmarks_point_one_way() -> None:
    order = ("lib", "baselines", "suites")
    for place, package in enumerate(order):
        above = "|".join(order[place + (package != "suites") :])  # suites share through lib
        for path in (ROOT / "benchmarks" / package).rglob("*.py"):
            upwards = re.findall(rf"^ *(?:from|import) (?:{above})\b.*", path.read_text(), re.MULTILINE)
            assert not upwards, f"{path}: {upwards}"


MISTAKES = {
    "moe": [
        (["--variants", "plain,fast"], "variants='fast' must be one of comet, "),
        (["--routing", "uniform,odd"], "routing='odd' must be one of uniform, zipf, hot"),
        (["--tokens", "abc"], "argument --tokens: invalid list of int value: 'abc'"),
    ],
    "decode": [
        (["--models", "gpt"], "models='gpt' must be one of deepseek_v3, "),
        (["--models", "gpt_oss_20b"], "models='gpt_oss_20b' must have experts of SwiGLU without biases"),
        (["--routing", "round"], "routing='round' must be one of"),
        (["--weights", "bf16,int4"], "weights='int4' must be one of bf16, mxfp8, mxfp4, fp8"),
        (["--try", "fold=0"], "unrecognized arguments: --try fold=0"),
        (["--tokens", "1,0"], "tokens=0 must be at least 1"),
        (["--tokens", "1,65", "--variants", "comet"], "tokens=65 must be at most 64 for variants=comet"),
        (["--variants", "local"], "variants='local' must be one of comet, torch, triton, transformers, fused for ep=1"),
        (
            ["--variants", "torch", "--ep", "2"],
            "variants='torch' must be one of comet, local, local_nccl, fused, own, own_nccl, own_fused for ep=2",
        ),
        (["--tokens", "65", "--variants", "own", "--ep", "2"], "tokens=65 must be at most 64 for variants=own"),
        (["--models", "tiny", "--ep", "3"], "num_experts=8 must be divisible by ep=3"),
        (["--models", "tiny", "--tp", "3"], "ffn_size=128 must be divisible by tp=3"),
    ],
    "generate": [
        (["--model", "gpt"], "model='gpt' must be one of qwen3_30b_a3b, tiny"),
        (["--layers", "0"], "layers=0 must be at least 1"),
        (["--contexts", "128,0"], "contexts=0 must be at least 1"),
        (["--batch", "65"], "batch=65 must be at most 64, which warp decode takes"),
        (["--model", "tiny", "--ep", "3"], "num_experts=8 must be divisible by ep=3"),
    ],
    "train": [
        (["--models", "odd"], "models='odd' must be one of"),
        (["--ep", "3"], "num_experts=128 must be divisible by ep=3"),
        (["--tokens", "3000"], "tokens=3000 must be a multiple of context=2048"),
        (["--variants", "comet,fast"], "variants='fast' must be one of comet, comet_graph, plain, rest"),
        (["--layers", "0"], "layers=0 must be at least 1"),
    ],
    "megatron": [
        (["--models", "odd"], "models='odd' must be one of"),
        (["--ep", "3"], "num_experts=128 must be divisible by ep=3"),
        (["--rounds", "0"], "rounds=0 must be at least 1"),
        (["--tp", "2"], "tp=2 must be 1"),
    ],
}


@pytest.mark.parametrize("suite", MISTAKES)
def test_mistakes_on_the_command_line_are_named(suite: str) -> None:
    for arguments, message in MISTAKES[suite]:
        with pytest.raises(ValueError, match=re.escape(message)):
            importlib.import_module(f"suites.{suite}").Run.parse(arguments)


@pytest.mark.parametrize("suite", ["moe", "timeline", "decode"])
def test_ranks_are_those_of_torchrun(suite: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [suite, "--device", "cpu", "--ep", "2", "--tp", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(lib.ranks, "started_by_torchrun", lambda: False)
    with pytest.raises(ValueError, match="ep=2 x tp=2: start 4 ranks with torchrun"):
        bench.main(words)
    context = LaunchContext(rank=0, world_size=2, local_rank=0, local_world_size=2, node=0, num_nodes=1, device=CPU)
    monkeypatch.setattr(lib.ranks, "started_by_torchrun", lambda: True)
    monkeypatch.setattr(lib.ranks, "current_context", lambda: context)
    with pytest.raises(ValueError, match="nproc=2 must equal ep x tp = 4"):
        bench.main(words)
    assert not (tmp_path / "out").exists(), "nothing was measured"


def test_a_timeline_of_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites.timeline.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(suites.timeline.Run, "open_layer", None)  # comes after the check
    with pytest.raises(ValueError, match="device=cpu must be used with TRITON_INTERPRET=1: only kernels record"):
        suites.timeline.Run.parse([]).run(ALONE)
