"""The fine-tuning benchmark: a run on a CPU, and a wrong variant that is not timed."""

import json
from pathlib import Path

import pytest
from bench_cases import ALONE

from lib.steps import check_variants
from lib.suite import Checked
from suites.finetune import COMET, STOCK, FineTuning, Run

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
pytest.importorskip("peft", reason="needs pip install peft")

WORDS = "--device cpu --model tiny --layers 1 --sequences 2 --context 16 --rounds 1".split()


def test_comet_and_stock_experts_are_timed_with_equal_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Run.main([*WORDS, "--out", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert not row["failures"]
    for name in (STOCK, COMET):
        assert row[f"{name}_tokens_s"] == pytest.approx(32_000 / row[f"{name}_ms"])
    assert 0 <= row["loss_error"] < 1e-5


def test_experts_that_train_otherwise_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning, checked, step = FineTuning(Run.parse(WORDS), ALONE), Checked(ALONE), FineTuning.step
    monkeypatch.setattr(FineTuning, "step", lambda self, variant, index: step(self, STOCK, index + (variant == COMET)))
    check_variants(tuning, (STOCK, COMET), checked, STOCK)
    assert (list(checked.variants), list(checked.failures)) == ([STOCK], [COMET])
    assert checked.failures[COMET].startswith(f"loss differs from that of {STOCK} by ")


def test_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ep=2 and tp=1 must be 1: one device"):
        Run.parse([*WORDS, "--ep", "2"])
