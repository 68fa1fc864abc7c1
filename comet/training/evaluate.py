"""What a model has learned: its loss on held-out text, and a text of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from comet.layer.group import ExpertGroup
from comet.models.config import NUM_BYTE_VALUES
from comet.models.gpt import GPT
from comet.training.data import heldout_windows

TEMPERATURE = 0.8


@torch.no_grad()
def heldout_loss(model: GPT, group: ExpertGroup, text: Tensor, *, num_batches: int, batch_size: int) -> float:
    """Mean loss over evenly spread held-out sequences, the same ones for every layout of ranks (collective).

    Batch b goes to rank ``b % world_size``. A rank without a batch in the last round repeats the first one and does not
    count it, because all ranks of a MoE group must call the model equally often.
    """
    windows = heldout_windows(text, num_windows=num_batches * batch_size, context=model.config.context)
    batches = windows.split(batch_size)
    total = torch.zeros(2, dtype=torch.float64, device=group.device)
    for first in range(0, len(batches), group.world_size):
        index = first + group.world_rank
        batch = batches[index if index < len(batches) else 0].to(group.device)
        logits = model(batch[:, :-1]).logits
        nats = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").double().sum()
        if index < len(batches):
            total += torch.stack([nats, nats.new_tensor(batch[:, 1:].numel())])
    if group.world_size > 1:
        dist.all_reduce(total)
    nats_sum, num_bytes = total.tolist()
    return float(nats_sum / num_bytes)


@torch.no_grad()
def sample_text(model: GPT, group: ExpertGroup, prompt: bytes, *, num_bytes: int, seed: int) -> bytes:
    """Continue ``prompt``, at least a byte; every rank of a MoE group takes part and runs the same sequence."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        ids = torch.tensor([text[-model.config.context :]], device=group.device)
        logits = model(ids).logits[0, -1, :NUM_BYTE_VALUES].cpu()
        text.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
    return bytes(text[len(prompt) :])
