"""The router's benchmark: its command line, what its variants compute, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench_router
import pytest
import torch
from bench_router import DEEPSEEK, ROTATE, config_of, main, parse, run, variants_of
from points import Ranks
from ranks import run_ranks
from shapes import model
from torch.testing import assert_close

from comet.tuner.timing import Variant

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_command_line() -> None:
    arguments = parse(["--models", "tiny,deepseek_v3", "--tokens", "1,64", "--rounds", "3"])
    assert (arguments.models, arguments.tokens, arguments.rounds) == (("tiny", "deepseek_v3"), [1, 64], 3)
    assert parse([]).models == ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3")
    assert parse([]).tokens == [1, 64, 2048, 8192]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "tiny,odd"], "models='odd' must be one of mixtral_8x7b, "),
        (["--tokens", "8,0"], r"tokens=\[8, 0\] must each be at least 1"),
        (["--tokens", "8,many"], "argument --tokens: invalid whole_numbers value: '8,many'"),
        (["--rounds", "0"], "rounds=0 must be at least 1"),
    ],
)
def test_mistakes_on_the_command_line_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(words)


def test_a_cpu_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_router, "start_ranks", None)  # comes after the check
    with pytest.raises(ValueError, match="the router's benchmark needs a GPU"):
        main([])


def test_a_mistake_is_one_line() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_router.py"), "--rounds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "comet: error: rounds=0 must be at least 1\n"


def differing_variants(rank: int, world_size: int) -> dict[str, list[str]]:
    """The variants whose kernels compute something else than plain torch, by the model's rule; every pair is asked."""
    found = {}
    for rule, config in {"tiny": model("tiny"), "deepseek_v3": replace(model("tiny"), **DEEPSEEK)}.items():
        with torch.no_grad():
            variants = variants_of(config, 70, CPU)
            pairs = {name: (of, variants[f"{name}_torch"]) for name, of in variants.items() if "_torch" not in name}
            found[rule] = [name for name, pair in pairs.items() for index in range(ROTATE) if differ(*pair, index)]
        assert pairs.keys() == {"router", "logits", "select", "measure", "train"}
    return found


def differ(one: Variant, other: Variant, index: int) -> bool:
    try:
        assert_close(one(index), other(index))
    except AssertionError:
        return True
    return False


def test_kernels_and_torch_compute_the_same() -> None:
    """So that the benchmark compares like with like."""
    assert run_ranks(differing_variants, 1, interpret=True) == [{"tiny": [], "deepseek_v3": []}]


def test_deepseek_has_its_own_rule() -> None:
    config = config_of("deepseek_v3")
    assert (config.score, config.num_groups, config.top_groups, config.balance) == ("sigmoid", 8, 4, "bias")
    assert config_of("tiny") == model("tiny")


def test_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_router, "capture", lambda variant, rotate: variant)
    monkeypatch.setattr(bench_router, "variants_of", lambda *point: {"router": lambda index: point})
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    run(parse(["--models", "tiny,mixtral_8x7b", "--tokens", "8,32", "--rounds", "2"]), Ranks(0, CPU, None))
    *table, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["task"], found["device"]) == ("bench_router", "cpu")
    points = [("tiny", 8), ("tiny", 32), ("mixtral_8x7b", 8), ("mixtral_8x7b", 32)]
    assert [(row["model"], row["tokens"]) for row in found["rows"]] == points
    assert table[0].split() == ["model", "tokens", "router"]
    assert [line.split() for line in table[1:]] == [[str(value) for value in row.values()] for row in found["rows"]]
