"""Activations and biases for tests of every path."""

import torch
from torch import Tensor

from comet.kernels.runtime.activation import Activation
from comet.layout import Biases

ACTIVATIONS = [Activation(), Activation("geglu"), Activation("reglu"), Activation("clamped_swiglu", limit=1.0)]
NAMES = [activation.name for activation in ACTIVATIONS]


def draw_biases(num_experts: int, ffn_size: int, hidden_size: int, dtype: torch.dtype, seed: int = 0) -> Biases:
    """``(E, 2F)`` and ``(E, D)``, of about the size of what they are added to."""
    made = torch.Generator().manual_seed(1000 + seed)
    shapes = ((num_experts, 2 * ffn_size), (num_experts, hidden_size))
    return Biases(*(torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) / 2 for shape in shapes))


def on_paper(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """The formulas as papers write them, in the type of gate and up."""
    if activation.name == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation.name == "geglu":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    if activation.name == "reglu":
        return gate * (gate > 0) * up
    assert activation.limit is not None
    limited = torch.minimum(gate, torch.tensor(activation.limit, dtype=gate.dtype))
    linear = torch.maximum(torch.minimum(up, torch.tensor(activation.limit)), torch.tensor(-activation.limit))
    return limited / (1 + torch.exp(-activation.alpha * limited)) * (linear + 1)
