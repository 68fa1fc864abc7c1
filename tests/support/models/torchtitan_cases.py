"""torchtitan's trainer on CPU ranks: its debug models with small experts, what it refuses on a CPU, and its losses."""

import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

FOLDER = Path(__file__).parents[3] / "build" / "torchtitan"  # ``make torchtitan`` installs torchtitan there
EXPERTS = "comet.integrations.torchtitan.experts"
FLAVORS = {"qwen3": "debugmodel_moe", "deepseek_v3": "debugmodel", "gpt_oss": "debugmodel", "kimi_k2_7": "debugmodel"}
NUM_EXPERTS, TOP_K, FFN_SIZE = 8, 2, 64
VOCABULARY = 2048


def prepare(rank: int) -> None:
    """Make torchtitan importable and let it run on CPU ranks with a released torch.

    It takes "cuda" for the device where it finds none. Its attention compiles for GPUs, and torch refuses to train the
    uncompiled one on a CPU, although it can. Gloo has no scaled sums, and torch 2.13 no ``set_timeout``.
    """
    sys.path.append(str(FOLDER))
    os.environ["LOCAL_RANK"] = str(rank)
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = _device_module()
    from torch.nn.attention import flex_attention
    from torchtitan import trainer
    from torchtitan.distributed import fsdp
    from torchtitan.models.common.attention import FlexAttention

    flex_attention._validate_device = lambda *tensors: None
    FlexAttention._compiled_flex_attn = staticmethod(flex_attention.flex_attention)
    fsdp.disable_fsdp_gradient_division = partial(_sum_gradients, fsdp.disable_fsdp_gradient_division)
    trainer.time = types.SimpleNamespace(perf_counter=trainer.time.perf_counter, sleep=lambda seconds: None)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout


def _device_module() -> types.SimpleNamespace:
    found = {name: getattr(torch.cpu, name) for name in torch.cpu.__all__}
    nothing = dict.fromkeys(("reset_peak_memory_stats", "empty_cache"), lambda: None)
    properties = types.SimpleNamespace(total_memory=2**30, name="cpu")
    return types.SimpleNamespace(
        **found | nothing | {"current_device": lambda: 0},
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device=None: properties,
        memory_stats=lambda device: {},
    )


def _sum_gradients(disable_division: Any, model: Any) -> None:
    from torch.distributed.fsdp import FSDPModule

    disable_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def in_float32() -> None:
    """Let torchtitan's experts, and Comet's in their place, multiply in float32, so that losses can be compared."""
    from comet.integrations.torchtitan import routed

    torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign]
    routed.DTYPE = torch.float32


def model_spec(model: str, num_layers: int = 2) -> Any:
    """A debug model of torchtitan with few layers and small experts."""
    spec = import_module(f"torchtitan.models.{model}").model_registry(FLAVORS[model], attn_backend="flex")
    spec.model.layers = spec.model.layers[:num_layers]
    for layer in spec.model.layers:
        if (moe := layer.moe) is not None:
            inner, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
            for each in (moe, inner, dispatcher, moe.router):
                each.num_experts = NUM_EXPERTS
            moe.router.gate.out_features = NUM_EXPERTS
            moe.router.top_k = dispatcher.top_k = TOP_K
            inner.hidden_dim = FFN_SIZE
    return spec


def make_trainer(
    model: str,
    imports: list[Any],
    *,
    steps: int = 50,
    num_layers: int = 2,
    folder: Path | None = None,
    load_step: int = -1,
    **fields: Any,
) -> Any:
    """A trainer of torchtitan with its own losses, optimizer and parallelism, on made-up text.

    Args:
        imports: Of ``override.imports``.
        folder: Where checkpoints of each second step go; ``None`` writes none.
        load_step: Of the checkpoint to go on from, after which none is written.
        fields: Of ``ParallelismConfig``, of ``TrainingConfig``, or of the trainer's configuration.
    """
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import DebugConfig, OverrideConfig, ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    spec = model_spec(model, num_layers)
    parallelism = {name: fields.pop(name) for name in list(fields) if name in ParallelismConfig.__slots__}
    training = {name: fields.pop(name) for name in list(fields) if name in TrainingConfig.__slots__}
    tokenizer, dataloader = data_classes()
    sizes = dict(local_batch_size=2, seq_len=32, mixed_precision_param="float32", disable_cuda_graphs=True)
    trainer = Trainer.Config(
        model_spec=spec,
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=tokenizer.Config(),
        dataloader=dataloader.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(steps=steps, **(sizes | training)),
        parallelism=ParallelismConfig(**({"spmd_backend": "partial_dtensor"} | parallelism)),
        checkpoint=CheckpointManager.Config(
            enable=folder is not None,
            interval=2,
            last_save_model_only=False,
            load_step=load_step,
            load_only=load_step > 0,
        ),
        debug=DebugConfig(seed=3),
        override=OverrideConfig(imports=imports),
        **({"activation_checkpoint": None} | fields),
    ).build()
    draw_apart(trainer.model_parts)
    if trainer.parallel_dims.pp_enabled:
        trainer.pp_schedule.step = partial(_step_of_microbatches, trainer.pp_schedule)
    return trainer


@torch.no_grad()
def draw_apart(models: list[Any]) -> None:
    """Draw all but norms again, the same ones for every layout.

    On CPUs torch draws the same numbers for each shard of a ``DTensor``. Experts would be equal in pairs, and so would
    the router's scores for them: roundings would choose between the two.
    """
    for name, held in (each for model in models for each in model.named_parameters()):
        if isinstance(held, DTensor) and "norm" not in name:
            plain = name.replace("_checkpoint_wrapped_module.", "")
            generator = torch.Generator().manual_seed(crc32(plain.encode()))
            whole = 0.05 * torch.randn(held.shape, generator=generator)
            size, first = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
            held.to_local().copy_(whole[tuple(slice(start, start + n) for start, n in zip(first, size, strict=True))])


def _step_of_microbatches(schedule: Any, **microbatches: Any) -> None:
    """Run a schedule of one stage on microbatches, which torch 2.13 takes from a whole batch only."""
    schedule._stage.has_backward = True
    schedule._stage.clear_runtime_states()
    schedule._step_microbatches(**microbatches)


def train(trainer: Any) -> list[tuple[float, float]]:
    """Train to the end and return the loss and the norm of the gradients of each step, on ranks that have a loss."""
    told: list[tuple[float, float]] = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **others: told.append((loss, norm))
    trainer.train()
    trainer.close()
    return told


def data_classes() -> tuple[Any, Any]:
    """A tokenizer that is never asked, and text without end: each row counts upwards in a step of its own."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **kwargs: Any) -> None: ...

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **kwargs: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Counting(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(
            self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **kwargs: Any
        ) -> None:
            self.rank, self.world_size, self.rows, self.length = dp_rank, dp_world_size, local_batch_size, seq_len
            self.batch = 0

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                first = (self.batch * self.world_size + self.rank) * self.rows
                row = torch.arange(first, first + self.rows)[:, None]
                text = (row * 37 + torch.arange(self.length + 1) * (row % 5 + 1)) % VOCABULARY
                positions = torch.arange(self.length).expand(self.rows, -1).contiguous()
                self.batch += 1
                yield {"input": text[:, :-1].contiguous(), "positions": positions}, text[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {"batch": self.batch}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.batch = state_dict["batch"]

    return Tokenizer, Counting
