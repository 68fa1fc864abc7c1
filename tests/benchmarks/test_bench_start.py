"""How every benchmark starts: its ranks, its words on the command line, and what a mistake on it becomes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import bench
import pytest
import torch
from tiers import slow

from comet.launch.distributed import LaunchContext

import lib.start
import suites.moe
import suites.timeline
from lib.arguments import whole_numbers, words
from lib.ranks import Ranks
from lib.start import tell

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("moe", "--ep", "3"), "nproc=2 must equal ep x tp = 3"),
        slow(("timeline", "--modelz", "x"), "unrecognized arguments: --modelz x"),
        slow(("decode", "--tokens", "a"), "argument --tokens: invalid whole_numbers value: 'a'"),
        slow(("generate", "--contexts", "0"), "contexts=[0] must each be at least 1"),
    ],
)
def test_a_mistake_is_one_line_of_rank_0(words: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks" / "bench.py"), *words, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert [line for line in done.stderr.splitlines() if "comet: " in line] == [f"comet: error: {message}"]
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
    with pytest.raises(ValueError, match="suite='rooter' must be one of compare-paths, compare-trees, decode, "):
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
    order = ("lib", "baselines", "variants", "suites")
    for place, package in enumerate(order):
        above = "|".join(order[place + (package != "suites") :])  # what suites share is in lib
        for path in (ROOT / "benchmarks" / package).rglob("*.py"):
            upwards = re.findall(rf"^ *(?:from|import) (?:{above})\b.*", path.read_text(), re.MULTILINE)
            assert not upwards, f"{path}: {upwards}"


def test_words_example() -> None:
    assert words("comet,plain") == ("comet", "plain")
    assert words("comet") == ("comet",)


def test_whole_numbers_example() -> None:
    assert whole_numbers("8,32") == [8, 32]
    with pytest.raises(ValueError, match="argument --tokens: invalid whole_numbers value: 'abc'"):
        suites.moe.parse(["--tokens", "abc"])


def test_rank_0_tells(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        tell(Ranks(rank, CPU, None), f"rank {rank}: done")
    assert capsys.readouterr() == ("", "rank 0: done\n")


@pytest.mark.parametrize("benchmark", [suites.moe, suites.timeline])
def test_ranks_are_those_of_torchrun(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--ep", "2", "--tp", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(benchmark, "started_by_torchrun", lambda: False)
    with pytest.raises(ValueError, match="start the benchmark with torchrun: it sets rank and world size"):
        benchmark.main(words)
    context = LaunchContext(rank=0, world_size=2, local_rank=0, local_world_size=2, node=0, num_nodes=1, device=CPU)
    for module in (benchmark, lib.start):
        monkeypatch.setattr(module, "started_by_torchrun", lambda: True)
    monkeypatch.setattr(lib.start, "current_context", lambda: context)
    with pytest.raises(ValueError, match="nproc=2 must equal ep x tp = 4"):
        benchmark.main(words)
    assert not (tmp_path / "out").exists(), "nothing was measured"


def test_a_timeline_of_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites.timeline.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(suites.timeline, "open_layer", None)  # comes after the check
    with pytest.raises(ValueError, match="device=cpu must be used with TRITON_INTERPRET=1: only kernels record"):
        suites.timeline.run(*suites.timeline.parse([]), Ranks(0, CPU, None))
