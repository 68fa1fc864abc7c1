"""Engines that come and go on one group: none leaves memory behind, and each answers as the first one did."""

import gc
import warnings
from pathlib import Path

import torch
from ranks import in_ranks
from training_cases import MODEL, awake_model, equal_bits, make_group

from comet.decode.runners import DataParallelDecode, ReplicatedRunner
from comet.generation.engine import GPTEngine
from comet.layer.group import ExpertGroup

DECODE_TOKENS = (5, 16, 64, 7, 6)  # 5, 6 and 7 take the memory of 8


def kept() -> tuple[int, int]:
    """Return the numbers of tensors and of mappings of symmetric memory in this process."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isinstance touches deprecated objects of torch
        tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    return tensors, Path("/proc/self/maps").read_text().count("comet-memory")


def answers(group: ExpertGroup, decode_tokens: int) -> list[torch.Tensor]:
    model, _ = awake_model(MODEL, group)
    engine = GPTEngine(model, group, decode_tokens=decode_tokens)
    prompt = engine.prefill(torch.arange(6).view(2, 3), torch.tensor([3, 3]), 8)
    steps = [engine.decode(torch.tensor([step, step + 1])) for step in range(3)]
    engine.check()
    return [prompt, *steps]


def use_engines(group: ExpertGroup) -> None:
    expected = {count: answers(group, count) for count in DECODE_TOKENS}
    DataParallelDecode(MODEL.moe, group)
    before = kept()
    for number, count in enumerate(2 * DECODE_TOKENS):
        equal_bits(torch.stack(answers(group, count)), torch.stack(expected[count]))
        DataParallelDecode(MODEL.moe, group)
        if number == len(DECODE_TOKENS):
            group.comm.restart()
    tensors, mappings = kept()
    assert tensors <= before[0], "engines left tensors behind"
    assert mappings == before[1], "symmetric memory"


def test_engines_of_one_rank_leave_no_memory() -> None:
    group = make_group(MODEL.moe)
    use_engines(group)
    group.close()


@in_ranks(2)
def test_engines_over_ranks_leave_no_memory(rank: int, world_size: int) -> None:
    group = make_group(MODEL.moe, ep=2)
    use_engines(group)
    first, second = (ReplicatedRunner(MODEL.moe, group, count).decode_on_ranks for count in (5, 8))
    assert first.words is second.words
    before = kept()
    for _ in range(2):
        make_group(MODEL.moe, ep=2).close()
    gc.collect()
    assert kept()[1] == before[1], "a group that is closed gives its memory back"
    group.close()
