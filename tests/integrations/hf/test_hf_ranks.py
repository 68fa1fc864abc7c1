"""Hugging Face models over several processes: EP, TP and both, against the stock model, and sharded loading."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


from hf_cases import (
    DECODE_TOKENS,
    FAMILIES,
    check_token_counts,
    greedy,
    make_group,
    prompt,
    run_group,
    save_fused,
    tiny_model,
)
from ranks import run_ranks

from comet.integrations import hf


def checkpoints(root: Path) -> dict[str, Path]:
    """A folder per naming of experts as transformers saves it (one by one, in several files), and a fused one."""
    folders = {}
    for family in ("mixtral", "deepseek_v3"):
        model = tiny_model(family)
        folders[family] = root / family
        model.save_pretrained(folders[family], max_shard_size="40KB")
        assert len(list(folders[family].glob("*.safetensors"))) > 1, "the index is not tested"
    save_fused(model, root / "fused")
    return folders | {f"{family} fused": root / "fused"}


def expert_bytes(family: str) -> int:
    model = tiny_model(family)
    return sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if ".experts." in name
    )


LAYOUTS = {(2, 1): FAMILIES, (1, 2): FAMILIES, (2, 2): ("qwen3_moe",)}


@pytest.mark.slow
def test_groups(tmp_path: Path) -> None:
    # Four processes: two groups of two side by side, then one of four. Importing transformers costs more than checks.
    found = run_ranks(run_group, 4, LAYOUTS, checkpoints(tmp_path), timeout=300)
    for (ep, tp), families in LAYOUTS.items():
        for rank in range(4):
            logits, read = found[rank][ep, tp]
            for family, mine, first in zip(families, logits, found[0][ep, tp][0], strict=True):
                assert torch.equal(mine, first), f"{family}, ep {ep}, tp {tp}: ranks 0 and {rank} differ"
            assert len(read) == 3
            for label, num_bytes in read.items():
                total = expert_bytes(label.split(" ")[0])
                assert num_bytes * ep * tp == total, f"{label}, rank {rank} read {num_bytes} of {total} bytes"


def narrow_slices(rank: int, world_size: int) -> None:
    """F / TP = 24: warp decode takes multiples of 16 only."""
    check_token_counts(rank, 1, 2, ffn_size=48)


@pytest.mark.slow
def test_slices_may_be_narrow_where_warp_decode_is_off() -> None:
    run_ranks(narrow_slices, 2, timeout=300)


def generations(rank: int, world_size: int, ep: int, tp: int) -> list[torch.Tensor]:
    """Sampled tokens, and greedy ones with and without an assistant, of one model over the ranks."""
    model = tiny_model("deepseek_v3")
    group = make_group(model, ep, tp)
    hf.convert(model, group, decode_tokens=DECODE_TOKENS)
    ids = prompt(1, 5)
    made = [greedy(model, ids)]
    settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6)
    with torch.no_grad():
        assistant = copy.deepcopy(model)
        made.append(model.generate(ids, assistant_model=assistant, do_sample=False, **settings))
        torch.manual_seed(5)
        made.append(model.generate(ids, do_sample=True, temperature=1.5, top_p=0.95, **settings))
    hf.check(model)
    group.close()
    return made


def test_sampling_and_an_assistant_over_ranks() -> None:
    # The assistant proposes several tokens, so steps of one and of more tokens alternate, of two models.
    wanted = generations(0, 1, 1, 1)
    assert torch.equal(wanted[0], wanted[1])
    assert not torch.equal(wanted[0], wanted[2]), "a draw must be seen"
    for made in run_ranks(generations, 2, 2, 1, timeout=300):
        for mine, alone in zip(made, wanted, strict=True):
            assert torch.equal(mine, alone)
