"""A layer with a shared expert, and the same without side streams; late streams, and memory that is reused early."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.layer.group import make_expert_group
from comet.layer.sharding import local
from comet.moe import MoE
from comet.router.losses import RouterStats
from comet.utils.streams import SideStream

CONFIG = MoEConfig(
    hidden_size=256, ffn_size=256, num_experts=16, top_k=4, shared_ffn_size=512, aux_loss_coef=0.5, z_loss_coef=0.5
)
NUM_TOKENS = 500
Run = Callable[[Tensor], tuple[Tensor, RouterStats]]
NAP = 20_000_000  # cycles; some 10 ms, much longer than a layer


@dataclass(frozen=True)
class Pair:
    """Two layers with equal weights over one pool: with streams, and one after the other."""

    streams: MoE
    in_line: MoE


def make_pair(device: torch.device | str, dtype: torch.dtype, path: str = "auto", ep: int = 1) -> Pair:
    group = make_expert_group(CONFIG, ParallelConfig(ep=ep), max_tokens=NUM_TOKENS, dtype=dtype, device=device)
    in_line = replace(group, side_stream=SideStream(None))
    layers = (
        MoE(CONFIG, one, path=path, overlap=OverlapConfig(num_panels=1), seed=3, param_dtype=dtype)
        for one in (group, in_line)
    )
    return Pair(*layers)


def make_tokens(layer: MoE, seed: int) -> Tensor:
    """``(T, D)``, of one direction more than of others, so that experts are loaded unevenly and differently by seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(NUM_TOKENS, CONFIG.hidden_size, generator=generator)
    tokens += 0.5 * torch.randn(CONFIG.hidden_size, generator=generator)
    return tokens.to(layer.group.device, layer.group.workspace.shape.dtype)


def train_step(layer: MoE, tokens: Tensor, run: Run | None = None, *, late: bool = False) -> dict[str, Tensor]:
    """Return output, statistics and all gradients of the layer, or of ``run`` in its place.

    With ``late``, work on the side stream is late, and free memory is poisoned.
    """
    layer.zero_grad()
    x = tokens.clone().requires_grad_()
    hooks = [] if not late else delay(layer, x)
    y, stats = (run or layer)(x * 0.5)  # only the layer refers to its input
    loss = stats.loss
    torch.autograd.backward([y, loss], [tokens.flip(0), torch.ones_like(loss)])
    for hook in hooks:
        hook.remove()
    assert x.grad is not None
    found = {"output": y.detach(), "loss": loss.detach(), "load": stats.expert_load, "x": x.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = local(parameter.grad).clone()
    return found


def delay(layer: MoE, like: Tensor) -> list[torch.utils.hooks.RemovableHandle]:
    """Hold up the shared expert's stream in both passes; meanwhile, in the backward pass, write over free memory."""
    assert layer.shared is not None
    poisoned: list[Tensor] = []

    def nap(*_: object) -> None:
        if layer.group.device.type == "cuda":
            torch.cuda._sleep(NAP)

    def poison(_: Tensor) -> None:  # on the layer's stream, which does not wait for the shared expert here
        poisoned.extend(torch.full_like(like, float("nan")) for _ in range(16))

    return [
        layer.shared.register_forward_pre_hook(nap),
        layer.shared.register_full_backward_pre_hook(nap),
        layer.router.weight.register_hook(poison),
    ]


def named(result: tuple[Tensor, RouterStats]) -> dict[str, Tensor]:
    return {"output": result[0], "loss": result[1].loss, "load": result[1].expert_load}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """Equal on a CPU; on a GPU up to some roundings, for cuBLAS may take another algorithm on another stream."""
    assert found.keys() == wanted.keys()
    for name, actual in found.items():
        expected = wanted[name]
        if not actual.is_cuda or not actual.is_floating_point() or not actual.numel():
            assert torch.equal(actual, expected), f"{what}: {name}"
            continue
        limit = 16 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
        error = float((actual - expected).abs().max())
        assert error <= limit, f"{what}: {name} is off by {error:.3e}, more than {limit:.3e}"
