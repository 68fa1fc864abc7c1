"""Steps of layers that replay graphs, compared with eager layers: on GPUs and, from recorded operations, on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from generate_cases import Captures, all_experts, graphs_on_cpu
from stream_cases import NUM_TOKENS, assert_same
from torch import Tensor, nn

from comet import MoE, MoEConfig, OverlapConfig, ParallelConfig, make_expert_group
from comet.graphed.moe import GraphedMoE, Output
from comet.layer.expert_path import FunctionPath
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import local
from comet.layout import RoutedTokens
from comet.router.router import Router

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
    """Return the gradients themselves, not copies: a later replay must not change them."""
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
    """Call ``assert_same``; without a shared expert, tensors that cuBLAS does not compute have equal bits, too."""
    assert_same(found, wanted, what)
    if not any(name.startswith("shared") for name in found):
        for name in found.keys() & {"w1", "w2", "expert_load"}:
            assert torch.equal(found[name], wanted[name]), f"{what}: {name}"


CONFIG = MoEConfig(
    num_experts=8, top_k=2, hidden_size=32, ffn_size=16, shared_ffn_size=16, aux_loss_coef=0.5, z_loss_coef=0.5
)


class LaterExperts(SymmetricPath):
    """All experts for all tokens, by operations that can be recorded; gradients of weights are made later if wanted.

    ``made`` gets the names of those that were.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made: list[str] = []

    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor) -> Tensor:
        output: Tensor = _LaterExperts.apply(*routed, w1, w2, self)
        return output


class _LaterExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ids: Tensor, factors: Tensor, w1: Tensor, w2: Tensor, path: Any) -> Tensor:
        ctx.save_for_backward(tokens, ids, factors, w1, w2)
        ctx.deferred, ctx.made = path.deferred, path.made
        return all_experts(None, RoutedTokens(tokens, ids, factors), w1, w2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ids, factors, w1, w2 = ctx.saved_tensors

        def make(*places: int) -> list[Tensor]:
            inputs = [each.detach().requires_grad_() for each in (tokens, factors, w1, w2)]
            with torch.enable_grad():
                output = all_experts(None, RoutedTokens(inputs[0], ids, inputs[1]), *inputs[2:])
            return list(torch.autograd.grad(output, [inputs[place] for place in places], grad))

        of_tokens, of_factors = make(0, 1)
        if ctx.deferred is None:
            return of_tokens, None, of_factors, *make(2, 3), None
        ctx.deferred[:] = (
            lambda: ctx.made.append("w1") or make(2)[0], lambda: ctx.made.append("w2") or make(3)[0],
        )  # fmt: skip
        return of_tokens, None, of_factors, None, None, None


def make_layer(path: str = "dense", config: MoEConfig = CONFIG, **settings: Any) -> MoE:
    group = make_expert_group(config, ParallelConfig(), max_tokens=64, dtype=torch.float32, device=torch.device("cpu"))
    moe = MoE(config, group, overlap=OverlapConfig(num_panels=1), seed=5, **settings)
    later = LaterExperts(config, group, OverlapConfig(num_panels=1), use_kernels=False)
    moe.experts = later if path == "later" else FunctionPath(partial(all_experts, None))
    return moe


def replace_bias(layer: MoE) -> None:
    """The first expert is chosen for every token, by a buffer in new memory."""
    bias = torch.zeros(layer.config.num_experts, device=layer.group.device)
    bias[0] = 9
    layer.router.selection_bias = bias


def replace_router(layer: MoE) -> None:
    layer.router = Router(layer.config, device=layer.group.device)


def replace_weight(layer: MoE) -> None:
    layer.w1 = nn.Parameter(layer.w1.detach() * 2)


def replace_data(layer: MoE) -> None:
    layer.w1.data = layer.w1.data * 2


def remove_shared(layer: MoE) -> None:
    layer.shared = None


def replace_all(layer: MoE) -> None:
    layer.load_state_dict({name: each * 2 for name, each in layer.state_dict().items()}, assign=True)


REPLACEMENTS: list[Callable[[MoE], None]] = [
    replace_bias, replace_router, replace_weight, replace_data, remove_shared, replace_all,
]  # fmt: skip


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Captures:
    found = graphs_on_cpu(monkeypatch)
    monkeypatch.setattr("comet.graphed.moe.capture", found)
    monkeypatch.setattr("comet.graphed.moe.device_obstacle", lambda device: "")
    return found


def draw(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


def leaf(num_tokens: int, seed: int) -> Tensor:
    return draw(num_tokens, seed).requires_grad_()
