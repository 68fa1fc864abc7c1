"""Small routers for tests: by seed, or with logits that the test chooses."""

import torch

from comet.config import MoEConfig
from comet.router.losses import RouterStats
from comet.router.router import Router, Routing

D = 16
VARIANTS = [
    {},
    {"top_k": 1},
    {"top_k": 8},
    {"renormalize": False},
    {"score": "sigmoid"},
    {"score": "sigmoid", "renormalize": False, "routed_scale": 2.5},
    {"num_groups": 4, "top_groups": 2, "top_k": 3},
    {"num_groups": 8, "top_groups": 3, "top_k": 3},
    {"score": "sigmoid", "num_groups": 4, "top_groups": 1},
    {"score": "sigmoid", "balance": "bias", "num_groups": 4, "top_groups": 2, "top_k": 4, "routed_scale": 2.5},
    {"balance": "bias", "top_k": 3},
    {"num_experts": 1, "top_k": 1},
]


def make_config(**changes: object) -> MoEConfig:
    fields = {"hidden_size": D, "ffn_size": 16, "num_experts": 8, "top_k": 2} | changes
    return MoEConfig(**fields)


def make_router(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> Router:
    torch.manual_seed(seed)
    return Router(make_config(**changes), dtype=dtype)


def identity_router(**changes: object) -> Router:
    """A router whose logits are the first E components of the token."""
    router = make_router(**changes)
    with torch.no_grad():
        router.weight.copy_(torch.eye(router.config.num_experts, D))
    return router


def tokens_of_logits(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(logits, (0, D - logits.shape[1]))


def stats_of(router: Router, routing: Routing) -> RouterStats:
    return router.measure(routing.logits, routing.scores, routing.top_k_ids)
