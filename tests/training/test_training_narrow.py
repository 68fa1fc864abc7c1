"""Training where a rank's slice of the experts is no multiple of 16 columns wide: checkpoints hold no padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks import run_ranks
from training_cases import MODEL, MOE, Rank, make_job

from comet.jobs.config import JobConfig
from comet.training.trainer import train

NARROW = replace(MODEL, num_layers=1, moe=replace(MOE, ffn_size=48))


def run_job(rank: int, world_size: int, job: JobConfig) -> dict[str, object]:
    return train(job, Rank(rank, world_size))


def test_a_checkpoint_of_24_columns_per_rank_loads_on_one_rank(tmp_path):
    split = make_job(tmp_path, model=NARROW, tp=2, steps=3)
    first, second = run_ranks(run_job, 2, split)
    assert first == second
    whole = train(make_job(tmp_path, model=NARROW, steps=3, resume=first["checkpoint"]), Rank())
    assert whole["steps"] == 3
    assert whole["heldout_nats_per_byte"] == pytest.approx(first["heldout_nats_per_byte"], rel=1e-5)
