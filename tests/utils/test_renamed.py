"""Public names of the release before: they work, and warn."""

import pytest
import torch

import comet.decode
from comet import GraphedMoE, MoE, MoEConfig, ParallelConfig, make_expert_group

CONFIG = MoEConfig(hidden_size=16, ffn_size=16, num_experts=4, top_k=2)


def test_former_names_work_and_warn() -> None:
    with pytest.deprecated_call(match="spare_multiprocessors is now reserved_sms"):
        group = make_expert_group(
            CONFIG, ParallelConfig(), max_tokens=8, dtype=torch.float32, device="cpu", spare_multiprocessors=3
        )
    assert group.reserved_sms == 3
    graphed = GraphedMoE(MoE(CONFIG, group))
    with pytest.deprecated_call(match="why_eager is now graph_fallback_reason"):
        assert graphed.why_eager == graphed.graph_fallback_reason
    with pytest.deprecated_call(match="OwnTokensRunner is now comet.decode.DataParallelDecode"):
        assert comet.decode.OwnTokensRunner is comet.decode.DataParallelDecode
    with pytest.raises(AttributeError, match="has no attribute 'TheirTokensRunner'"):
        comet.decode.TheirTokensRunner  # noqa: B018
    group.close()
