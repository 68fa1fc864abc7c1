"""Experts of a trained model on ranks so that their loads are about equal, for ``comet place``.

The order of a layer's experts means nothing to the model: its weights, their moments and the rows of its router change
places together. So a layer computes what it computed, and costs what it cost, with about equal loads of ranks. Loads
are those of ``metrics.jsonl``: the last tenth of the run, of which the last window judges what the others chose.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from comet.config import require
from comet.schedule.placement import imbalance, place, rank_loads, redundant_experts, shared_loads, who_holds
from comet.training.checkpoint import alone_on_purpose, cause_of, read_whole
from comet.training.checkpoint_files import Writer
from comet.training.checkpoint_folder import (
    METADATA,
    Checkpoint,
    choose_checkpoint,
    complete,
    named_checkpoints,
    open_partial,
    remove_checkpoint,
)
from comet.training.report import History

# In blocks with experts, the first axis of these tensors is the experts. The group is the number of the block.
BY_EXPERT = re.compile(r"\w+\.blocks\.(\d+)\.ffn\.(?:w1|w2|b1|b2|router\.weight|router\.selection_bias)(?:\.\w+)?")
COPIES = (1, 2)  # The gain for inference is shown with so many copies of experts on each rank.


class LayerGain(NamedTuple):
    """The largest over the mean load of a rank."""

    now: float
    placed: float  # with the experts in another order
    copied: Sequence[float]  # with so many copies on each rank as ``COPIES`` says, in the order of now


@dataclass(frozen=True, slots=True)
class Placement:
    """The orders of the experts of a checkpoint, and what they bring."""

    checkpoint: Checkpoint
    orders: list[list[int]]  # for each MoE layer
    gains: list[LayerGain]


def find_placement(source: str, num_ranks: int) -> Placement:
    """Order the experts of each layer of a run, or of one of its checkpoints, for so many ranks.

    Raises:
        ValueError: If there is no whole checkpoint or no record of loads, or ranks do not divide the experts.
    """
    checkpoint, _ = choose_checkpoint(*named_checkpoints("source", source))
    if checkpoint is None:
        raise ValueError(f"source={source!r} must hold a checkpoint of `comet train`")
    num_experts = checkpoint.model["moe.num_experts"]
    require(
        num_ranks > 1 and num_experts % num_ranks == 0,
        f"ep={num_ranks} must be at least 2 and divide num_experts={num_experts}",
    )
    chosen_from, judge = recorded_loads(checkpoint)
    orders = [place(loads, num_ranks, checkpoint.model["moe.num_groups"]) for loads in chosen_from]
    gains = [gain(*each, num_ranks) for each in zip(chosen_from, judge, orders, strict=True)]
    return Placement(checkpoint, orders, gains)


def recorded_loads(checkpoint: Checkpoint) -> tuple[list[list[float]], list[list[float]]]:
    """Loads ``(layers, E)`` to choose by and to judge by, from the last tenth of the run up to a checkpoint."""
    folder = checkpoint.path.parent
    windows = [each for each in History(None, folder, checkpoint.step).windows if each.expert_load]
    require(bool(windows), f"{folder} must hold metrics.jsonl with the loads of experts up to the checkpoint")
    recent = windows[-max(len(windows) // 10, 2) :]
    chosen_from = np.sum([each.expert_load for each in recent[:-1] or recent], axis=0)
    return chosen_from.tolist(), recent[-1].expert_load


def gain(chosen_from: list[float], judge: list[float], order: list[int], num_ranks: int) -> LayerGain:
    """Judge an order and copies, chosen by some loads, by other loads."""
    copied = []
    for copies in COPIES:
        held = redundant_experts(chosen_from, num_ranks, min(copies, len(judge) - len(judge) // num_ranks))
        holds = who_holds(len(judge), num_ranks, held)
        copied.append(imbalance(shared_loads(np.array(judge), holds).tolist()))
    placed = rank_loads([judge[expert] for expert in order], num_ranks)
    return LayerGain(imbalance(rank_loads(judge, num_ranks)), imbalance(placed), copied)


def write_placed(found: Placement, folder: Path) -> Path:
    """Write the checkpoint into a new folder, its experts in the orders that were found; return its path."""
    checkpoint = found.checkpoint
    orders = dict(enumerate(found.orders, checkpoint.model["dense_layers"]))  # The key is the number of a block.
    tensors = read_whole(checkpoint.path)
    for name, tensor in tensors.items():
        if (match := BY_EXPERT.fullmatch(name)) and (order := orders.get(int(match[1]))):
            tensors[name] = tensor[order]
    part = open_partial(folder, checkpoint.step)
    kept = {name: getattr(checkpoint, name) for name in ("step", "layout", "model", "text", "layers")}
    try:
        for name in checkpoint.files:
            if name != METADATA and not name.endswith(".distcp"):  # settings, and the tokenizer of a run that has one
                shutil.copyfile(checkpoint.path / name, part / name)
        with alone_on_purpose():
            dcp.save(tensors, storage_writer=Writer(part, partial(complete, part, kept)))
    except (CheckpointException, OSError) as error:
        remove_checkpoint(part)
        if not any(folder.iterdir()):
            folder.rmdir()
        _, cause = cause_of(error)
        raise ValueError(f"checkpoint {part.with_suffix('')} cannot be written: {cause}") from error
    return part.with_suffix("")
