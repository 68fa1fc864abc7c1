"""Slots of a cache that a kernel dequantises on a GPU: the bits of torch, and prompts from them."""

from __future__ import annotations

import pytest
import torch
from cache_cases import cache_of
from cached_layers import CUDA, K, case_of, draw_step
from dequantize_cases import SIZES, check_dequantize, stored_slots

from comet.decode.runners import LocalRunner
from comet.decode.twin import slot_weights
from comet.experts import CachedExperts, streaming
from comet.kernels.decode.dequantize import dequantize_slots

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", SIZES)
def test_the_kernel_has_the_bits_of_torch(kind: str, dtype: torch.dtype) -> None:
    qwen3, gpt_oss = ((1536, 2048), (2048, 768)), ((5760, 2880),)
    for rows, columns in (*SIZES[kind], *qwen3, *gpt_oss):
        check_dequantize(kind, rows, columns, dtype, CUDA)


@pytest.mark.parametrize("kind", ["mxfp8", "fp8"])
def test_offsets_past_two_billion_elements(kind: str) -> None:
    """The last slots of a large cache give what they give in a small one."""
    stored, first = stored_slots(kind, 2, 8192, 4096, seed=1), 70
    large = []
    for part in (stored.elements, stored.scales):
        slots = torch.zeros(first + 2, *part.shape[1:], dtype=part.dtype, device=CUDA)
        slots[first:] = part.to(CUDA)
        large.append(slots)
    assert large[0].numel() > 2**31
    found = dequantize_slots(*large, torch.tensor([first + 1, first], dtype=torch.int32, device=CUDA), torch.bfloat16)
    assert torch.equal(found.cpu(), stored.dequantize(torch.bfloat16)[[1, 0]])


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("num_bytes", [1, streaming.FLOATING_BYTES], ids=["one by one", "in groups"])
def test_prompts_have_the_bits_that_torch_gives_them(
    kind: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through caches whose experts are dequantised by the kernel and by torch."""
    monkeypatch.setattr(streaming, "FLOATING_BYTES", num_bytes)
    made, case = torch.Generator().manual_seed(3), case_of(1, F=224, quantised=kind, seed=3)
    paths = [CachedExperts(cache_of(case, 11, device=CUDA), LocalRunner(K, 4), K) for _ in range(2)]
    for num_tokens in (60, 5, 200):
        inputs = draw_step(made, num_tokens, masked=False)
        found = paths[0](*inputs, *paths[0].cache.weights.parts[:2])
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "floating_slots", slot_weights)
            wanted = paths[1](*inputs, *paths[1].cache.weights.parts[:2])
        assert torch.equal(found, wanted), f"{num_tokens} tokens"
