"""The example for Megatron users on CPU ranks: Megatron's distributed optimizer, schedules and checkpoints.

Losses are those of Megatron's ``SequentialMLP``, and a checkpoint of either continues under the other.
"""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron_cases import let_optimizers_run, let_run
from ranks import in_ranks

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "megatron_gpt.py"
EXPERTS = ("megatron", "comet")

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs pip install 'comet-moe[megatron]'"
)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_rounding(found: list[float], expected: list[float], what: str) -> None:
    """Equal but for some roundings in float32 of the largest loss."""
    assert found == pytest.approx(expected, rel=0, abs=2e-6), f"{what}: {found} {expected}"


def prepare(dtype: torch.dtype, pp: int, has_bias: bool, folder: Path) -> Any:
    """Return a function that runs the example with ``experts`` for ``steps``, from and to checkpoints in the folder."""
    let_run()
    let_optimizers_run()
    program = example()
    program.DTYPE, configure = dtype, program.transformer_config
    program.transformer_config = lambda args: replace(configure(args), add_bias_linear=has_bias)

    def run(experts: str, steps: int, source: str = "", target: str = "") -> list[float]:
        words = ["--experts", experts, "--steps", str(steps), "--pipeline-model-parallel-size", str(pp)]
        words += ["--load", str(folder / source)] if source else []
        words += ["--save", str(folder / target)] if target else []
        losses: list[float] = program.main(program.parse(words))
        return losses

    return run


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "pp", "has_bias"), [(2, 1, True), (4, 1, False), (4, 2, False)])
@in_ranks("ranks", timeout=600)
def test_losses_and_checkpoints(
    rank: int, world_size: int, ranks: int, pp: int, has_bias: bool, tmp_path: Path
) -> None:
    """EP2, EP2 over two replicas, and PP2 x EP2: four micro-batches a step. Weights decay, biases do not."""
    run = prepare(torch.float32, pp, has_bias, tmp_path)
    run("megatron", 1, target="start")
    stock, ours = (run(experts, 20, "start", experts) for experts in EXPERTS)
    assert len(stock) == (0 if pp == 2 and rank < 2 else 20)
    assert all(losses[-1] < 0.1 * losses[0] for losses in (stock, ours) if losses)
    assert_rounding(ours, stock, "twenty steps")
    expected = stock
    for saved in EXPERTS:
        for experts in EXPERTS:
            found = run(experts, 3, saved)
            expected = expected if (saved, experts) != ("megatron", "megatron") else found
            assert_rounding(found, expected, f"{saved} continued with {experts}")


@needs_megatron
@pytest.mark.slow
@in_ranks(4, timeout=600)
def test_checkpoints_have_the_same_tensors(rank: int, world_size: int, tmp_path: Path) -> None:
    """Weights in bf16 and states of the optimizer in float32 keep names, shapes and bits when the other reads them."""
    from megatron.core import dist_checkpointing

    run = prepare(torch.bfloat16, 1, True, tmp_path)
    run("megatron", 1, target="0")
    for number, experts in enumerate(("comet", "megatron", "comet")):
        run(experts, 0, str(number), str(number + 1))
    stored = [dist_checkpointing.load_plain_tensors(str(tmp_path / str(number))) for number in range(4)]
    first, *others = ({name: value for name, value in each.items() if torch.is_tensor(value)} for each in stored)
    assert first["optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight"].any()
    for other in others:
        assert other.keys() == first.keys()
        for name, value in first.items():
            assert other[name].dtype == value.dtype
            assert torch.equal(other[name], value), name


@needs_megatron
@pytest.mark.slow
def test_the_example_runs_as_its_first_lines_say(tmp_path: Path) -> None:
    words = [str(EXAMPLE), "--steps", "5", "--save", str(tmp_path / "saved")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(ROOT / "tests/support/models/megatron_cases.py"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [line.split() for line in ended.stdout.splitlines() if line.startswith("step")]
    assert [words[1] for words in told] == ["0", "1", "2", "3", "4"]
    assert float(told[-1][-1]) < float(told[0][-1])
