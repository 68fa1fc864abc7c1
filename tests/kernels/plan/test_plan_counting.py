"""What the first launch of a plan counts, packed into words: the numbers of the docstrings."""

from __future__ import annotations

from typing import Any

import torch
from plan_cases import random_case, workspace
from rank_plans import make_plan
from ranks import run_ranks

from comet.comm import LocalCommunicator

NUM_EXPERTS = 31  # as many waves have experts, and one more has the tokens that are not needed
NO_EXPERT = 31
IDS = {0: [6, 5], 1: [6, 6], 4: [13, -1], 9: [20, 13]}


def counted(rank: int, world_size: int) -> dict[str, list[Any]]:
    """What one rank's kernels store for its only chunk, whose tokens outside ``IDS`` have no experts."""
    from comet.layer import fused

    scratch: list[Any] = []
    place_plan = fused.place_plan

    def noted(*arguments: Any) -> None:
        scratch.append(arguments[2])
        place_plan(*arguments)

    fused.place_plan = noted
    case = random_case(0, 1, 1, num_experts=NUM_EXPERTS, top_k=2, max_tokens=128)
    ids = torch.full((128, 2), -1, dtype=torch.int32)
    for token, slots in IDS.items():
        ids[token] = torch.tensor(slots)
    make_plan(
        ids, torch.ones(ids.shape), case.layout(0), workspace(case, LocalCommunicator(torch.device("cpu"))),
        block_rows=16, expert_capacity=None, max_routed_rows=1024,
        use_kernels=True,
    )  # fmt: skip
    names = ("recv_waves", "send_waves", "recv_ranks", "send_ranks", "counts", "positions")
    return {name: getattr(scratch[0], name)[0, 0].tolist() for name in names}


def test_examples_of_the_words() -> None:
    (stored,) = run_ranks(counted, 1, interpret=True)
    for side in ("recv", "send"):  # one rank: both are its own tokens at its own experts
        words, ranks = words_of_waves()
        assert stored[f"{side}_ranks"] == ranks
        assert stored[f"{side}_waves"] == [words[wave // 8] >> wave % 8 * 8 & 255 for wave in range(32)]
        assert stored[f"{side}_waves"][13] == words[1] >> 40 & 255 == 2
        assert [stored[f"{side}_ranks"][token] for token in (4, 9)] == [13 * 128, 13 * 128 + 1]
    words, positions = words_of_experts()
    assert [stored["positions"][token] for token in (0, 1)] == [positions[0], positions[1]] == [[0, 0], [1, 2]]
    assert stored["counts"][:8] == [words[expert // 4] >> expert % 4 * 16 & 0xFFFF for expert in range(8)]
    assert stored["counts"][6] == words[1] >> 32 & 0xFFFF == 3


def words_of_waves() -> tuple[list[int], list[int]]:
    """Bytes of four words, one per wave, and every token's wave * 128 + tokens of the wave before it."""
    words, ranks = [0] * 4, []
    for token in range(128):
        wave = min((expert for expert in IDS.get(token, []) if expert >= 0), default=NO_EXPERT)
        ranks.append(wave * 128 + (words[wave // 8] >> wave % 8 * 8 & 255))
        words[wave // 8] += 1 << wave % 8 * 8
    return words, ranks


def words_of_experts() -> tuple[list[int], dict[int, list[int]]]:
    """Two words of the first block of 8 experts, 16 bits each, and the positions of the tokens that it has."""
    words: list[int] = [0] * 2
    positions: dict[int, list[int]] = {}
    for token, slots in IDS.items():
        for expert in slots:
            if 0 <= expert < 8:
                positions.setdefault(token, []).append(words[expert // 4] >> expert % 4 * 16 & 0xFFFF)
                words[expert // 4] += 1 << expert % 4 * 16
    return words, positions
