"""What is compared with: the same model in transformers, its experts moved to the device by ``accelerate``.

transformers 5 keeps all experts of a layer in one module, so ``accelerate`` moves all of a layer that it does not hold.
"""

from __future__ import annotations

import copy
import importlib.util
import time
from typing import Any

import torch
from torch import Tensor, nn

from comet.config import require
from comet.errors import UnavailableError
from comet.models.gpt import GPT

from baselines.library import make_library_model

EXTRA, NEEDED = "comet-moe[bench]", ("accelerate", "transformers")


class WithShared(nn.Module):
    """A feed-forward layer of transformers' Qwen3-MoE and the shared expert of Comet's, added up.

    Args:
        routed: Router and experts.
        shared: Of the same layer.
    """

    def __init__(self, routed: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.routed = routed
        self.shared = shared

    def forward(self, hidden: Tensor) -> Tensor:
        """``(B, P, D)`` -> the same."""
        return self.routed(hidden) + self.shared(hidden.flatten(0, 1)).view_as(hidden)


def has_accelerate() -> bool:
    """Whether accelerate and transformers are installed."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def require_accelerate() -> None:
    """Raise ``UnavailableError`` unless ``has_accelerate``."""
    if not has_accelerate():
        raise UnavailableError(
            f"the variant accelerate needs {' and '.join(NEEDED)}: pip install '{EXTRA}', or leave it out"
        )


def make_offloaded(gpt: GPT, budget: float) -> Any:
    """transformers' model over the weights of ``gpt``, the experts of its first layers on the device.

    Args:
        gpt: Frozen, its experts in host memory (pinned ones are moved faster).
        budget: Share of the layers whose experts are on the device, rounded down.

    Raises:
        UnavailableError: If accelerate or transformers is missing.
    """
    require_accelerate()
    from accelerate import dispatch_model

    require(0 < budget <= 1, f"budget={budget} must be a share of the experts, above 0 and up to 1")
    model = make_library_model(gpt, None)
    layers, device = gpt.moe_layers(), gpt.rotary.device
    there = int(budget * len(layers))
    places: dict[str, Any] = {"model.embed_tokens": device, "model.norm": device, "model.rotary_emb": device}
    places["lm_head"] = device
    for number, (layer, moe) in enumerate(zip(model.model.layers, layers, strict=True)):
        name = f"model.layers.{number}"
        for part, _ in layer.named_children():
            places[f"{name}.{part}"] = device
        routed = f"{name}.mlp"
        if moe.shared is not None:
            layer.mlp = WithShared(layer.mlp, copy.deepcopy(moe.shared))  # accelerate changes the module
            places |= {f"{name}.mlp.shared": device, f"{name}.mlp.routed": device}
            routed = f"{name}.mlp.routed"
        del places[f"{name}.mlp"]
        places.pop(routed, None)
        places |= {f"{routed}.gate": device, f"{routed}.experts": device if number < there else "cpu"}
    return dispatch_model(model, device_map=places, main_device=device)


def first_token_s(model: Any, ids: Tensor) -> float:
    """Seconds from a prompt ``(1, P)`` to its next token."""
    started = time.perf_counter()
    model(ids, logits_to_keep=1).logits.argmax().item()
    return time.perf_counter() - started


def tokens_per_s(model: Any, ids: Tensor, num_tokens: int) -> float:
    """Rate of ``num_tokens`` tokens behind the first one that follows a prompt ``(1, P)``."""
    moments: list[float] = []

    def note(made: Tensor, _: Tensor, **__: Any) -> Tensor:
        made[0, -1].item()  # waits for the device
        moments.append(time.perf_counter())
        return torch.zeros(len(made), dtype=torch.bool, device=made.device)

    model.generate(ids, do_sample=True, max_new_tokens=num_tokens + 1, stopping_criteria=[note], use_cache=True)
    return num_tokens / (moments[-1] - moments[0])
