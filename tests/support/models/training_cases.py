"""Small training jobs for the tests of model, loop and checkpoints."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from comet.config import MoEConfig, ParallelConfig
from comet.experts.options import StoreOptions
from comet.jobs.config import DataConfig, GenerateJob, TrainConfig, TrainJob
from comet.jobs.generate import GenerateConfig
from comet.kernels.runtime.activation import Activation
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.sharding import local
from comet.models.config import ModelConfig
from comet.models.gpt import GPT
from comet.training.ranks import RankContext
from comet.training.report import History
from comet.training.trainer import train

CPU = torch.device("cpu")
MOE = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)
MODEL = ModelConfig(
    name="test", context=32, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, dense_layers=0, moe=MOE
)
TRAIN = TrainConfig(
    steps=6, batch_size=4, lr=1e-2, warmup_steps=2, eval_batches=3, eval_every=0, checkpoint_every=0, sample_bytes=5
)
TEXTS = GenerateConfig()
TEXT = torch.arange(3000).square().remainder(97).to(torch.uint8)
# Without the load-balancing loss, which is not a mean over tokens, the global objective does not depend on the split.
LINEAR = replace(MODEL, moe=replace(MOE, balance="none", shared_ffn_size=16))
GPT_OSS = replace(LINEAR, moe=replace(LINEAR.moe, activation=Activation("clamped_swiglu", limit=0.5), expert_bias=True))


def Rank(
    rank: int = 0, world_size: int = 1, *, attempt: int = 0, job: str = "", device: torch.device = CPU
) -> RankContext:
    """The place of this process, as a launcher gives it."""
    return RankContext(rank=rank, world_size=world_size, device=device, attempt=attempt, job=job)


def train_on_rank(rank: int, world_size: int, job: TrainJob) -> dict[str, Any]:
    """The whole job as one of the ranks that ``run_ranks`` starts."""
    return train(job, Rank(rank, world_size))


def losses(folder: Path) -> list[float]:
    return [loss for window in History(None, folder, 1000).windows for loss in window.losses]


def make_text(folder: Path) -> Path:
    """A text with enough structure to be learned at once; ranks that read it may make it at the same time."""
    path, mine = folder / "text.txt", folder / f"text.{os.getpid()}"
    mine.write_bytes(b"".join(b"%d times %d is %d\n" % (a, b, a * b) for a in range(40) for b in range(40)))
    return mine.replace(path)


def make_job(folder: Path, *, model: ModelConfig = MODEL, ep: int = 1, tp: int = 1, **changes: object) -> TrainJob:
    """A job on ``make_text``; ``changes`` are fields of ``TrainConfig`` or of ``TrainJob``."""
    of_train = {name: value for name, value in changes.items() if hasattr(TRAIN, name)}
    of_job = {name: value for name, value in changes.items() if name not in of_train}
    settings: dict = {"output_dir": str(folder / "out"), "data": DataConfig(path=str(make_text(folder))), **of_job}
    return TrainJob(model=model, parallel=ParallelConfig(ep=ep, tp=tp), train=replace(TRAIN, **of_train), **settings)


def make_generation(model: ModelConfig, generate: GenerateConfig = TEXTS, *, ep: int = 1, tp: int = 1) -> GenerateJob:
    return GenerateJob(model=model, parallel=ParallelConfig(ep=ep, tp=tp), generate=generate)


def make_group(
    moe: MoEConfig = MOE,
    *,
    ep: int = 1,
    tp: int = 1,
    max_tokens: int = 256,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    node_size: int | None = None,
    **settings: Any,
) -> ExpertGroup:
    layout = ParallelConfig(ep=ep, tp=tp, node_size=node_size)
    return make_expert_group(moe, layout, max_tokens=max_tokens, dtype=dtype, device=device, **settings)


def make_model(
    model: ModelConfig = MODEL, *, seed: int = 0, path: str = "auto", **of_group: Any
) -> tuple[GPT, ExpertGroup]:
    group = make_group(model.moe, **of_group)
    return GPT(model, group, path=path, seed=seed), group


def wake(model: GPT, sharpness: float = 1.0) -> GPT:
    """Draw the head and the experts' biases, which start at zero, so that logits depend on everything before them."""
    drawn = torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(1))
    model.head.weight.data.copy_(drawn * sharpness)
    for layer in model.moe_layers():
        if layer.b1 is not None and layer.b2 is not None:
            experts, place = torch.arange(layer.layout.experts_local), layer.layout
            rows = torch.sin(1 + experts + place.first_expert) * sharpness
            local(layer.b1).data.copy_(rows[:, None, None].expand(local(layer.b1).shape))
            local(layer.b2).data.copy_(rows[:, None].expand(local(layer.b2).shape))
    return model


def awake_model(
    model: ModelConfig = MODEL,
    group: ExpertGroup | None = None,
    *,
    in_slots: bool = False,
    sharpness: float = 0.3,
    **of_group: Any,
) -> tuple[GPT, ExpertGroup]:
    """A model to generate with, its experts in host memory if they are to have slots, and its group."""
    group = make_group(model.moe, **of_group) if group is None else group
    return wake(GPT(model, group, seed=1, expert_device=CPU if in_slots else None), sharpness), group


def slots_of(num_slots: int | None, held: int = MOE.num_experts, **options: Any) -> StoreOptions:
    """Options by which each layer has so many slots for the experts that a rank holds; ``None``: all are resident."""
    return StoreOptions(expert_budget=None if num_slots is None else num_slots / held, **options)


equal_bits = partial(assert_close, rtol=0, atol=0)
nearly_equal = partial(assert_close, rtol=1e-4, atol=1e-4)


def compare_texts(
    *engines: Any, steps: int, prompt: int = 1, compare: Callable[[Tensor, Tensor], None] = equal_bits
) -> torch.Generator:
    """A prompt and so many steps give two engines the same logits; returns what the tokens were drawn from."""
    drawn = torch.Generator().manual_seed(7)
    ids = torch.randint(256, (1, prompt), generator=drawn)
    compare(*(engine.prefill(ids, torch.tensor([prompt]), 30) for engine in engines))
    for _ in range(steps):
        token = torch.randint(256, (1,), generator=drawn)
        compare(*(engine.decode(token) for engine in engines))
    return drawn
