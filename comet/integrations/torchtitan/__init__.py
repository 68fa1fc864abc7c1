"""torchtitan's MoE models with Comet's routed experts, by one line of torchtitan's configuration.

    torchrun --nproc-per-node 8 -m torchtitan.train --module qwen3 --config qwen3_moe_debug \\
        --parallelism.expert_parallel_degree 8 --override.imports comet.integrations.torchtitan.experts

Comet takes the place of the token dispatcher and of the products of the experts. Parameters, their names and their
``DTensor`` placements stay torchtitan's, and so do FSDP2, clipping, checkpoints and export.

Written for torchtitan 0.3: qwen3, deepseek_v3, kimi_k2_7 and gpt_oss, under EP or data parallelism alone, with any
data, sequence, context or pipeline parallelism around it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from comet.config import require
from comet.errors import UnavailableError

NEEDS = "comet.integrations.torchtitan needs torchtitan 0.3: pip install torchtitan==0.3.0"
TESTED = "0.3."


def check_version(found: str) -> None:
    """Raise ``ValueError`` unless this version of torchtitan has the classes that Comet replaces."""
    require(found.startswith(TESTED), f"torchtitan={found} must be {TESTED}x, whose classes Comet replaces: {NEEDS}")


try:
    check_version(version("torchtitan"))
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import RoutedExperts

    from comet.integrations.torchtitan.routed import CometRoutedExperts, Options, family_of
except (PackageNotFoundError, ImportError) as error:
    raise UnavailableError(f"{NEEDS}: {error}") from error


@override(target=RoutedExperts.Config, description="Comet's dispatch, products and combine of routed experts.")
def experts(config: Any, **options: Any) -> Any:
    """Return the configuration of a layer's routed experts with Comet in it; torchtitan calls this once per layer.

    Options follow the name in the configuration as JSON:
    ``--override.imports 'comet.integrations.torchtitan.experts={"reserved_sms": 16}'``.

    Args:
        config: ``RoutedExperts.Config``, as torchtitan's model has it.
        options: Fields of ``Options``.

    Raises:
        ValueError: If the model's experts are none that Comet computes, or an option is out of its limits.
    """
    family_of(config.inner_experts)
    return derive(config, CometRoutedExperts.Config, options=Options.of(**options))
