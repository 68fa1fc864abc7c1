"""``comet place``: a checkpoint with its experts in another order is the same model, with even loads of ranks."""

import errno
import json
from pathlib import Path

import pytest
import torch
from refusals import refusal
from text_cases import make_tokenizer
from training_cases import Rank, losses, make_text

from comet.launch.config import compose, make_job
from comet.launch.tasks.place import main
from comet.training.checkpoint_files import Writer
from comet.training.placing import find_placement, gain
from comet.training.trainer import train

TINY = ["model=tiny", "model.hidden_size=32", "model.moe.hidden_size=32", "model.moe.ffn_size=32", "model.context=32"]
SIZES = ["model.num_layers=3", "model.dense_layers=1", "train.eval_batches=1", "train.sample_bytes=0"]
BALANCE = ["model.moe.balance=bias", "model.moe.num_groups=2", "model.moe.top_groups=1", "model.moe.score=sigmoid"]
RUN = [*TINY, *SIZES, "train.lr=0.01", "train.seed=3", "train.batch_size=4", "train.steps=8"]
TOKENS = ["data.tokenizer=TOKENIZER", "model.vocab_size=320"]


@pytest.fixture(scope="module", params=[TOKENS, BALANCE], ids=["tokens", "groups and a bias"])
def run(request, tmp_path_factory) -> Path:
    """The folder of a run of 8 steps."""
    folder = tmp_path_factory.mktemp("run")
    chosen = [word.replace("TOKENIZER", str(make_tokenizer(folder / "tokenizer"))) for word in request.param]
    words = [*RUN, *chosen, f"data.path={make_text(folder)}", f"output_dir={folder}/out", "nproc=1"]
    train(make_job(compose([*words, "train.checkpoint_every=4"]), 1), Rank())
    return folder / "out"


def last_line(capfd) -> dict:
    return json.loads(capfd.readouterr().out.splitlines()[-1])


def test_a_placed_checkpoint_goes_on_as_the_run_does(run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main([f"{run}/step-000004", "--ep", "4", "--output-dir", "placed"]) == 0
    record = last_line(capfd)
    assert record["checkpoint"] == "placed/step-000004"
    found, wanted = (
        {file.name for file in Path(path).iterdir()} for path in (record["checkpoint"], run / "step-000004")
    )
    assert found == wanted, "settings and a tokenizer go along"
    for source, output in ((f"{run}/step-000004", "unplaced"), (record["checkpoint"], "more")):
        train(make_job(compose([f"resume={source}", f"output_dir={output}"]), 1), Rank())
    wanted = losses(tmp_path / "unplaced")
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "more")[-4:]), torch.tensor(wanted[-4:]))
    moved = [json.loads(line) for line in (tmp_path / "more/metrics.jsonl").read_text().splitlines()]
    kept = [json.loads(line) for line in (tmp_path / "unplaced/metrics.jsonl").read_text().splitlines()]
    orders = find_placement(f"{run}/step-000004", 4).orders
    for order, here, there in zip(orders, moved[-2]["expert_load"], kept[-2]["expert_load"], strict=True):
        assert sorted(order) == list(range(8))
        assert sum(abs(here[place] - there[expert]) for place, expert in enumerate(order)) < 0.05 * sum(there)


def test_a_full_disk_leaves_no_folder(run, tmp_path, monkeypatch, capfd):
    def write_data(self, plan, planner):
        (Path(self.path) / "__0_0.distcp").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Writer, "write_data", write_data)
    refused = refusal(capfd, "place", str(run), "--ep", "4", "--output-dir", str(tmp_path / "placed"))
    wanted = f"checkpoint {tmp_path}/placed/step-000008 cannot be written: [Errno 28] No space left"
    assert refused.startswith(wanted)
    assert not (tmp_path / "placed").exists()


def test_gains_are_judged_by_loads_that_did_not_choose():
    even = gain([8, 1, 8, 1], [9, 1, 9, 1], [0, 1, 2, 3], 2)
    assert even.now == 1.0
    skewed = gain([8, 8, 1, 1], [9, 9, 1, 1], [0, 2, 1, 3], 2)
    assert (skewed.now, skewed.placed) == (1.8, 1.0)


def test_what_cannot_be_placed_is_refused(run, tmp_path, capfd):
    for words, why in (
        ([str(run), "--ep", "3"], "ep=3 must be at least 2 and divide num_experts=8"),
        ([str(tmp_path), "--ep", "2"], f"source='{tmp_path}' must hold a checkpoint"),
        ([str(run), "--ep", "2", "--output-dir", str(tmp_path)], "must not be there yet"),
    ):
        assert why in refusal(capfd, "place", *words)
    (run / "metrics.jsonl").rename(run / "gone")
    with pytest.raises(ValueError, match=r"must hold metrics.jsonl"):
        find_placement(str(run), 2)
    (run / "gone").rename(run / "metrics.jsonl")
