"""The benchmark inside Megatron-core: its stand-in for grouped_gemm, its command line, and a run on CPU ranks."""

import json
from pathlib import Path

import pytest
import torch
from bench_cases import ALONE, run_on_rank
from ranks import run_ranks
from torch import nn

from lib.suite import Checked
from suites.megatron import check_variants, torch_grouped_gemm, train


def test_grouped_gemm_by_torch() -> None:
    draw = torch.Generator().manual_seed(3)
    rows, weights = (torch.randn(shape, generator=draw).bfloat16() for shape in ((7, 16), (3, 16, 32)))
    found = torch_grouped_gemm(rows, weights, torch.tensor([2, 0, 5]))
    expected = torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[2]])
    torch.testing.assert_close(found, expected)
    turned = weights.transpose(1, 2).contiguous()
    torch.testing.assert_close(torch_grouped_gemm(rows, turned, torch.tensor([2, 0, 5]), trans_b=True), expected)


class Scaled(nn.Module):
    """A stand-in for a layer of Megatron that returns no bias."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.router, self.scale = nn.Linear(4, 4, bias=False), scale
        nn.init.eye_(self.router.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.scale == 0:
            raise RuntimeError("no such experts")
        return self.scale * self.router(x), None


def test_what_fails_or_differs_is_not_timed() -> None:
    x = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(1))
    assert train(Scaled(1.0), x)["router"].shape == (4, 4)
    layers = {"sequential": Scaled(1.0), "grouped": Scaled(0), "comet": Scaled(2.0), "near": Scaled(1.01)}
    checked, others = Checked(ALONE), Checked(ALONE)
    check_variants(layers, [x], checked)
    assert list(checked.variants) == ["sequential", "near"]
    assert checked.failures["grouped"] == "RuntimeError: no such experts"
    assert checked.failures["comet"].startswith("differs from sequential by ")
    check_variants({**layers, "sequential": Scaled(0)}, [x], others)
    assert list(others.variants) == ["comet"], "the first that runs"
    assert others.failures["near"].startswith("differs from comet by ")


def on_cpu(rank: int, world_size: int, out: Path) -> None:
    from megatron_cases import use_cpu

    use_cpu()
    torch.compiler.set_stance("force_eager")
    words = ["--ep", "2", "--models", "tiny", "--tokens", "64,40", "--rounds", "2", "--out", str(out)]
    run_on_rank(rank, world_size, "megatron", words)


@pytest.mark.slow
def test_run(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs pip install 'comet-moe[megatron]'")
    run_ranks(on_cpu, 2, tmp_path, timeout=300)
    found = json.loads((tmp_path / "bench_megatron.json").read_text())
    assert found["task"] == "bench_megatron"
    assert [row["tokens"] for row in found["rows"]] == [64, 40]
    for row in found["rows"]:
        assert row["failures"] == {}
        assert min(row["sequential_ms"], row["grouped_ms"], row["comet_ms"], row["x_grouped"]) > 0
