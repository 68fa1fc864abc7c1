"""Training with a replayed layer beside the layer as it stands: equal layers, equal steps, every gradient compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from stream_cases import NUM_TOKENS, assert_same
from torch import Tensor

from comet import MoE, MoEConfig, OverlapConfig, ParallelConfig, make_expert_group
from comet.graphed.moe import GraphedMoE, Output
from comet.layer.sharding import local

Compare = Callable[[dict[str, Tensor], dict[str, Tensor], str], None]


@dataclass
class Steps:
    """The same optimizer steps on two layers that start from equal weights: ``graphed`` and ``eager``."""

    graphed: GraphedMoE
    eager: MoE
    compare: Compare
    lr: float = 0.05

    def __post_init__(self) -> None:
        self.optimizers = [
            torch.optim.SGD(layer.parameters(), lr=self.lr, foreach=False) for layer in (self.layer, self.eager)
        ]

    @property
    def layer(self) -> MoE:
        return self.graphed.layer

    def step(self, micro_batches: Sequence[Tensor], what: str, *, losses: str = "both") -> None:
        """Forward and backward for each micro-batch, everything compared, then one step of both optimizers.

        Each step starts from equal weights, so that what roundings may differ in does not grow.
        """
        self.eager.load_state_dict(self.layer.state_dict())
        for index, tokens in enumerate(micro_batches):
            found, wanted = (pass_through(run, tokens, losses=losses) for run in (self.graphed, self.eager))
            self.compare(found, wanted, f"{what}, micro-batch {index}")
            self.compare(gradients(self.layer), gradients(self.eager), f"{what}, micro-batch {index}")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare(weights(self.layer), weights(self.eager), what)


def pass_through(run: Callable[[Tensor], Output], tokens: Tensor, *, losses: str = "both") -> dict[str, Tensor]:
    """Forward and backward of one call: output, statistics and the gradient of the tokens.

    ``losses`` names what the backward pass starts from: ``output``, ``stats`` or ``both``.
    """
    x = tokens.clone().requires_grad_()
    output, stats = run(x * 0.5)
    total = torch.zeros((), device=x.device)
    if losses != "stats":
        total = total + (output.float() * tokens.flip(0).float()).sum()
    if losses != "output":
        total = total + stats.loss
    total.backward()
    assert x.grad is not None
    named = {"output": output.detach(), "x": x.grad}
    return named | {name: value.detach() for name, value in zip(stats._fields, stats, strict=True)}


def gradients(layer: MoE) -> dict[str, Tensor]:
    """Of all parameters that have one, as they are: a later replay must not change them."""
    return {name: local(each.grad) for name, each in layer.named_parameters() if each.grad is not None}


def weights(layer: MoE) -> dict[str, Tensor]:
    return {name: local(each).detach() for name, each in layer.named_parameters()}


def make_steps(
    device: str,
    config: MoEConfig,
    dtype: torch.dtype,
    *,
    ep: int = 1,
    param_dtype: torch.dtype | None = None,
    path: str = "auto",
) -> Steps:
    group = make_expert_group(config, ParallelConfig(ep=ep), max_tokens=NUM_TOKENS, dtype=dtype, device=device)
    overlap = OverlapConfig(num_panels=1)
    layers = [
        MoE(config, group, path=path, overlap=overlap, seed=3, param_dtype=param_dtype or dtype) for _ in range(2)
    ]
    return Steps(GraphedMoE(layers[0]), layers[1], assert_bits, lr=1e-4)


def assert_bits(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """As ``assert_same``; and without a shared expert, what cuBLAS has no part in is equal bit for bit."""
    assert_same(found, wanted, what)
    if not any(name.startswith("shared") for name in found):
        for name in found.keys() & {"w1", "w2", "expert_load"}:
            assert torch.equal(found[name], wanted[name]), f"{what}: {name}"
