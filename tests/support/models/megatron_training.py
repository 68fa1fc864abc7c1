"""A Megatron model with Comet, beside the same one with Megatron's experts, both in bf16, and the latter in float32."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron_cases import gradients, make_config, make_gpt, make_group, make_layer, start, stock_spec, twins
from torch import Tensor, nn

from comet.integrations.megatron import from_sequential
from comet.layer.group import ExpertGroup

Layout = tuple[int, int, int]  # EP, expert TP, TP
RATE = 0.02
BUCKET = 1000  # gradients of a parameter are on their way as soon as they are there
DELAY_CYCLES = 2_000_000  # a millisecond, longer than a layer takes


@dataclass(frozen=True)
class Size:
    hidden: int
    vocabulary: int
    sequence: int
    batch: int

    def fields(self) -> dict[str, Any]:
        """For ``make_config``: weights of which a layer adds little to its input (see ``clear_tokens``)."""
        return dict(
            hidden_size=self.hidden,
            ffn_hidden_size=self.hidden,
            moe_ffn_hidden_size=self.hidden // 2,
            moe_shared_expert_intermediate_size=self.hidden,
            num_moe_experts=8,
            moe_aux_loss_coeff=0.02,
            moe_z_loss_coeff=0.01,
            init_method_std=0.32 / self.hidden**0.5,
        )


def draw_batch(size: Size, seed: int, device: str) -> dict[str, Tensor]:
    """Arguments of a model's forward pass."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=generator).to(device)
    return dict(
        input_ids=tokens[:, :-1].contiguous(),
        position_ids=torch.arange(size.sequence, device=device).expand(size.batch, -1),
        attention_mask=torch.ones(1, 1, size.sequence, size.sequence, device=device).triu(1).bool(),
        labels=tokens[:, 1:].contiguous(),
    )


class Trainee:
    """A model under Megatron's data parallelism, which reduces gradients while the rest of them is computed.

    Plain gradient descent on float32 copies of the weights.
    """

    def __init__(self, config: Any, model: nn.Module) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=BUCKET)
        for name, parameter in model.named_parameters():
            if ".local_experts." in name:  # without, 0.16.1 mixes the parts of an expert whose TP is not the model's
                parameter.allreduce = False  # type: ignore[attr-defined]
        whole = Float16Module(config, model) if config.bf16 else model
        self.parallel = DistributedDataParallel(config, settings, whole)
        self.parameters = dict(model.named_parameters())
        self.weights = {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}

    def step(self, batch: dict[str, Tensor], late: random.Random) -> dict[str, Tensor]:
        """One step; returns each token's loss and all gradients, those of experts as Comet has them.

        Before the forward and the backward pass a GPU sleeps for some cycles.
        """
        from megatron.core.distributed import finalize_model_grads

        self.parallel.zero_grad_buffer()
        device = batch["labels"].device
        sleep(device, late.randrange(DELAY_CYCLES))
        found = self.parallel(**batch)
        sleep(device, late.randrange(DELAY_CYCLES))
        found.mean().backward()
        finalize_model_grads([self.parallel])
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.weights[name].sub_(RATE * parameter.main_grad))  # type: ignore[attr-defined]
        grads = {name: parameter.main_grad.clone() for name, parameter in self.parameters.items()}  # type: ignore[attr-defined]
        return {**from_sequential(grads), "loss": found.detach()}


class Deviations:
    """How far Megatron's and Comet's values in bf16 are from those in float32: sums of squares by name."""

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}

    def add(self, exact: dict[str, Tensor], stock: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
        assert exact.keys() == stock.keys() == ours.keys()
        for name, value in exact.items():
            found = torch.stack([other[name].double() for other in (exact, stock, ours)])
            found[1:] -= value.double()
            self.squares[name] = self.squares.get(name, 0) + found.flatten(1).square().sum(1)

    def check(self) -> None:
        """Comet's are at most twice as far as Megatron's, which are not far."""
        for name, (norm, stock, ours) in ((name, square.sqrt().tolist()) for name, square in self.squares.items()):
            assert stock <= 0.05 * norm, f"{name}: {stock} is no rounding of values of norm {norm}"
            assert ours <= 2 * stock, f"{name} of norm {norm}: error {ours} is more than twice Megatron's {stock}"


def sleep(device: torch.device, cycles: int) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


def make_clear(config: Any, spec: Any, size: Size, device: str) -> nn.Module:
    """A model of that size in which rounding does not change who computes a token."""
    model = make_gpt(config, spec, size.vocabulary, size.sequence).to(device)  # Megatron leaves positions on the CPU
    experts, parameters = config.num_moe_experts, dict(model.named_parameters())
    with torch.no_grad():
        words = parameters["embedding.word_embeddings.weight"]
        words.copy_(clear_tokens(*words.shape, experts, seed=1))
        parameters["embedding.position_embeddings.weight"][:, :experts] = 0
        for name, parameter in parameters.items():
            if name.endswith("mlp.router.weight"):
                parameter.copy_(clear_router(*parameter.shape))
    return model


def clear_tokens(count: int, hidden: int, num_experts: int, seed: int) -> Tensor:
    """Tokens ``(count, hidden)`` whose choice of experts is so clear that no rounding changes it, and so all gradients.

    The first elements are what each expert's logit is made of: equal steps in any order, large beside what layers add.
    """
    steps, draw = torch.linspace(-4, 4, num_experts), torch.Generator().manual_seed(seed)
    orders = torch.rand(count, num_experts, generator=draw).argsort(dim=1)
    return torch.cat([steps[orders], torch.randn(count, hidden - num_experts, generator=draw)], dim=1)


def clear_router(num_experts: int, hidden: int) -> Tensor:
    return 0.5 * torch.eye(num_experts, hidden)


def begin(size: Size, layout: Layout, device: str, **fields: Any) -> tuple[Any, Any, ExpertGroup]:
    """Configurations in bf16 and float32 for a layout, which is started, and Comet's group."""
    start(*layout, device)
    fields |= dict(size.fields(), use_cpu_initialization=device == "cpu")
    config = make_config(**fields, bf16=True, params_dtype=torch.bfloat16)
    spare = 0 if device == "cpu" else 32
    group = make_group(
        config, max_tokens=size.sequence * size.batch, dtype=torch.bfloat16, device=device, timeout_s=20.0,
        reserved_sms=spare,
    )  # fmt: skip
    return config, make_config(**fields), group


def train_beside_megatron(
    rank: int, world_size: int, size: Size, layouts: list[Layout], steps: int, device: str
) -> None:
    """In each layout steps of three models with the same weights, each rank late by another time in each."""
    for layout in layouts:
        config, wide, group = begin(size, layout, device)
        make = partial(make_clear, size=size, device=device)
        stock, ours = twins(make, config, group, rank)
        models = [Trainee(config, stock), Trainee(config, ours)]  # which rounds their weights
        exact = make(wide, stock_spec(wide))
        exact.load_state_dict(stock.state_dict())
        models = [Trainee(wide, exact), *models]
        deviations, late, batch = Deviations(), random.Random(100 + rank), draw_batch(size, rank, device)
        for _ in range(steps):
            deviations.add(*(model.step(batch, late) for model in models))
            group.workspace.check()
        deviations.check()
        group.close()


def layers_beside_megatron(rank: int, world_size: int, size: Size, layouts: list[Layout], device: str) -> None:
    """In each layout a layer's output and gradients, forward once more for the backward pass.

    Under TP ranks have parts of the sequence, which a whole model needs Transformer Engine or Apex for.
    """
    recompute = dict(recompute_granularity="selective", recompute_modules=["moe"])
    for layout in layouts:
        config, wide, group = begin(size, layout, device, **recompute)
        layers = [layer.bfloat16() for layer in twins(make_layer, config, group, rank)]
        for layer in layers:
            layer.router.weight.data.copy_(clear_router(*layer.router.weight.shape))
        exact = make_layer(wide, stock_spec(wide))
        exact.load_state_dict(layers[0].state_dict())
        count = size.sequence // layout[2] * size.batch
        x = clear_tokens(count, size.hidden, config.num_moe_experts, seed=rank).to(device, torch.bfloat16)
        x = x.view(-1, size.batch, size.hidden)
        deviations = Deviations()
        deviations.add(layer_values(exact, x.float()), *(layer_values(layer, x) for layer in layers))
        deviations.check()
        group.workspace.check()
        group.close()


def layer_values(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    inputs = x.clone().requires_grad_()
    output = layer(inputs)[0]
    output.float().square().mean().backward()
    return {**from_sequential(gradients(layer)), "output": output.detach(), "input": inputs.grad}
