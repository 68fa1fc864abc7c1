"""Training with a capacity: what experts drop is counted, and said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from training_cases import MODEL, Rank, make_job

from comet.layer.backend import Backend, expert_capacity
from comet.training.report import Window
from comet.training.step import count_dropped_rows
from comet.training.trainer import train

TIGHT = replace(MODEL, moe=replace(MODEL.moe, capacity_factor=0.5))


@pytest.mark.parametrize(("world_size", "ep", "tp"), [(2, 2, 1), (2, 1, 2), (2, 1, 1)])
def test_the_job_reports_what_the_plans_dropped(tmp_path, world_size: int, ep: int, tp: int) -> None:
    ranks = run_ranks(dropped_by_job_and_plans, world_size, tmp_path, ep, tp)
    planned = sum(dropped for _, dropped in ranks) / tp
    assert [reported for reported, _ in ranks] == [planned] * world_size
    assert planned > 0


def dropped_by_job_and_plans(rank: int, world_size: int, folder, ep: int, tp: int) -> tuple[float, int]:
    """What the job says was dropped, and what this rank's own plans of training steps say."""
    dropped, make_plan = [], Backend.plan

    def plan(backend, ids, weights, *, trains=False):
        made = make_plan(backend, ids, weights, trains=trains)
        dropped.append(int(made.status[1]) if trains else 0)
        return made

    Backend.plan = plan
    result = train(make_job(folder, model=TIGHT, ep=ep, tp=tp, moe_path="twin", steps=3), Rank(rank, world_size))
    return result["dropped_rows"], sum(dropped)


def test_a_dropless_job_drops_nothing(tmp_path) -> None:
    assert train(make_job(tmp_path, steps=3), Rank())["dropped_rows"] == 0


def test_share_example_of_the_docstring() -> None:
    assert run_ranks(example, 2) == [1.0, 1.0]
    window = Window(
        step=1, losses=[1.0], grad_norms=[1.0], learning_rate=1.0, expert_load=[[6, 2], [4, 4]], tokens_per_second=1.0
    )
    assert window.dropped_share == 0
    assert replace(window, dropped_rows=2).dropped_share == 0.125


def example(rank: int, world_size: int) -> float:
    from training_cases import make_model

    _, group = make_model(ep=2)
    assert expert_capacity(MODEL.moe, group) is None
    load = torch.tensor([[[2.0, 1.0]], [[3.0, 1.0]]])[rank]
    share = count_dropped_rows(load, 3, group)
    total = share.clone()
    dist.all_reduce(total)
    assert total == 2
    return share.item()
