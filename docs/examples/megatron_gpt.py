"""Train a small GPT with Megatron-core, its distributed optimizer and schedules, and Comet's experts.

``torchrun --nproc-per-node 2 docs/examples/megatron_gpt.py --save CHECKPOINTS`` trains over two ranks, GPUs where there
are any. ``--load CHECKPOINTS --experts megatron`` continues with Megatron's own experts, and the other way round.
Loading an optimizer needs Transformer Engine or Apex.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn.functional import silu

from comet import ExpertGroup, ParallelConfig, make_expert_group
from comet.integrations.megatron import moe_config, with_comet

VOCABULARY, SEQUENCE, MICRO_BATCH = 64, 16, 2
ON_GPUS = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPUS else torch.float32
DEVICE = torch.device("cuda", dist.get_node_local_rank(0)) if ON_GPUS else torch.device("cpu")
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT with Megatron-core and Comet.")
    parser.add_argument("--experts", choices=["comet", "megatron"], default="comet")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-model-parallel-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, whose gradients are added")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    return parser.parse_args(words)


def initialize(args: argparse.Namespace) -> None:
    """Make Megatron's process groups, inside those of torch."""
    if ON_GPUS:
        torch.cuda.set_device(DEVICE)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    torch.manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
    if ON_GPUS:
        model_parallel_cuda_manual_seed(1)


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=DTYPE is torch.bfloat16,
        params_dtype=DTYPE,
        pipeline_dtype=DTYPE,
        use_cpu_initialization=not ON_GPUS,
        masked_softmax_fusion=False,  # this and the next need kernels of Apex
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )


def model_provider(config: TransformerConfig, layer_spec: Any) -> GPTModel:
    """The layers of this rank's pipeline stage."""
    return GPTModel(
        config,
        layer_spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(DEVICE)


def make_group(config: TransformerConfig) -> ExpertGroup:
    """The ranks of this pipeline stage that share experts, and their memory for the tokens of a micro-batch."""
    return make_expert_group(
        moe_config(config),
        ParallelConfig(ep=config.expert_model_parallel_size),
        max_tokens=MICRO_BATCH * SEQUENCE,
        dtype=DTYPE,
        device=DEVICE,
    )


def setup_model_and_optimizer(
    config: TransformerConfig, group: ExpertGroup | None
) -> tuple[DistributedDataParallel, Any]:
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    model = model_provider(config, with_comet(spec, group) if group else spec)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, grad_reduce_in_fp32=True
    )
    parallel = DistributedDataParallel(config, ddp, Float16Module(config, model) if config.bf16 else model)
    settings = OptimizerConfig(
        optimizer="adam", lr=0.01, clip_grad=1.0, use_distributed_optimizer=True, bf16=config.bf16, params_dtype=DTYPE
    )
    optimizer = get_megatron_optimizer(settings, [parallel])
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = parallel.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return parallel, optimizer


def batches() -> Iterator[Tensor]:
    """Random sequences that count upwards, so that there is something to learn."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        first = torch.randint(VOCABULARY, (MICRO_BATCH, 1), generator=generator)
        yield ((first + torch.arange(SEQUENCE + 1)) % VOCABULARY).to(DEVICE)


def forward_step(data: Iterator[Tensor], model: DistributedDataParallel) -> tuple[Tensor, Any]:
    tokens = next(data)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=DEVICE).triu(1)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(MICRO_BATCH, -1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()), loss_func


def loss_func(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place


def train(
    args: argparse.Namespace, model: DistributedDataParallel, optimizer: Any, group: ExpertGroup | None
) -> list[float]:
    """Return the loss of each step, on ranks of the last pipeline stage."""
    data, losses = batches(), []
    for _ in range(args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=args.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        if group:
            group.workspace.check()  # raises if a rank failed in a layer
        losses += [float(torch.stack([each["loss"] for each in found]).mean())] if found else []
    return losses


def state(model: DistributedDataParallel, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    weights = unwrap_model(model).sharded_state_dict(metadata=METADATA)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading, metadata=METADATA)}


def save(folder: Path, model: DistributedDataParallel, optimizer: Any) -> None:
    model.start_param_sync(force_sync=True)  # or the next forward pass gathers what the optimizer has written
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state(model, optimizer, False), str(folder))


def load(folder: Path, model: DistributedDataParallel, optimizer: Any) -> None:
    """Continue a run. Megatron's own experts have empty extra states, which a checkpoint of Comet's lacks."""
    loaded = dist_checkpointing.load(state(model, optimizer, True), str(folder), strict=StrictHandling.LOG_UNEXPECTED)
    lacking, unknown = unwrap_model(model).load_state_dict(loaded["model"], strict=False)
    wrong = [name for name in lacking + unknown if not name.endswith("_extra_state")]
    if wrong:
        raise ValueError(f"load={folder} must be a checkpoint of this model: {', '.join(wrong)}")
    optimizer.load_state_dict(loaded["optimizer"])


def main(args: argparse.Namespace) -> list[float]:
    initialize(args)
    config = transformer_config(args)
    group = make_group(config) if args.experts == "comet" else None
    model, optimizer = setup_model_and_optimizer(config, group)
    if args.load:
        load(args.load, model, optimizer)
    losses = train(args, model, optimizer, group)
    if args.save:
        save(args.save, model, optimizer)
    if group:
        group.close()
    parallel_state.destroy_model_parallel()
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    for number, loss in enumerate(main(parse())):
        if dist.get_rank() == dist.get_world_size() - 1:
            sys.stdout.write(f"step {number} loss {loss:.6f}\n")
    dist.destroy_process_group()
