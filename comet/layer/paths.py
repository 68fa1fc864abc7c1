"""The ways to run routed experts, chosen by name; each is a callable over (routed tokens, w1, w2, biases)."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from comet.comm.collectives import CollectiveSteps
from comet.config import MoEConfig, OverlapConfig, PathName, require
from comet.layer.backend import layer_choice
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup
from comet.layer.nodes import NodesPath, nodes_obstacle, problem_over
from comet.layer.routed_experts import SymmetricPath
from comet.layer.weights import match_once, match_weights, pad_width
from comet.layout import Biases, RoutedTokens
from comet.reference.plain import CollectiveExperts, check_inputs, gather_reference_experts, plain_experts
from comet.schedule.choice import Problem
from comet.schedule.network import Rates, training_times
from comet.utils.uncompiled import uncompiled


class CollectivePath(ExpertPath):
    """One of the functions of ``comet.reference.plain`` for a layer: runs wherever ``torch.distributed`` does.

    Args:
        name: ``plain`` (all-to-all, grouped GEMMs, all-to-all, one after the other: what Comet is measured against) or
            ``reference`` (every rank gathers all weights: the specification).
    """

    waits_for_counts = True

    def __init__(self, name: PathName | str, config: MoEConfig, group: ExpertGroup) -> None:
        self.name = name
        self.compute: CollectiveExperts = plain_experts if name == "plain" else gather_reference_experts
        self.activation = config.activation
        self.layout = group.layout(config)
        self.comm = group.comm
        self.process_group = group.process_group
        number = group.workspace.layers_made
        self.steps = self.process_group and CollectiveSteps(self.comm, self.process_group, number)
        self.match = match_once(match_weights, config, self.layout, biased=config.expert_bias)

    @uncompiled
    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        self.match(w1, w2, *(biases or ()))
        w1, w2, biases = pad_width(w1, w2, biases)
        inputs = (*routed, w1, w2, *(biases or ()))
        if self.steps and self.layout.world_size > 1:
            # Here, because a rank that finds this inside of a step has begun a pass that it does not go on with.
            check_inputs(routed, w1, w2, self.layout, routed.tokens.dtype)
            return self.steps(self._run, *inputs)
        with self.comm.step("forward pass"):
            return self._run(*inputs)

    def _run(
        self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor, *biases: Tensor
    ) -> Tensor:
        routed, given = RoutedTokens(tokens, top_k_ids, top_k_weights), Biases(*biases) if biases else None
        return self.compute(routed, w1, w2, self.layout, self.process_group, self.activation, given)


def make_path(
    name: PathName | str, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None = None
) -> SymmetricPath | NodesPath | CollectivePath:
    """The path called ``name`` (collective over the group, unless it is one rank).

    ``auto`` is ``fused`` on a GPU and ``twin`` on a CPU, or ``plain`` where that was measured to be faster or nothing
    else can run. Over several nodes both run inside each node.

    Raises:
        ValueError: If there is no such path, it cannot honour the configuration or the setting, or ranks of the group
            ask for different ones.
        UnavailableError: If it needs symmetric memory and the group has none.
    """
    group.check_same(config, path=name, overlap=overlap)
    over_nodes = bool(group.nodes or group.nodes_obstacle)
    obstacle = nodes_obstacle(group) if over_nodes else group.comm.memory_obstacle
    if name == "auto" and obstacle:
        require(overlap is None, f"overlap={overlap} must be left out for path 'plain': {obstacle}")
        group.resolver.warn(
            f"{obstacle}. So its layers take path 'plain', also to decode, whose communication no computation hides; "
            "groups of ep x tp ranks on one node of Hopper GPUs are faster"
        )
        name = "plain"
    if name == "auto":
        name = "fused" if group.device.type == "cuda" else "twin"
        # Over nodes no profile holds times of either path.
        if config.capacity_factor is None and not over_nodes and layer_choice(config, group, overlap).setting is None:
            name = "plain"
    elif overlap is not None and name in ("plain", "reference", "twin"):
        group.resolver.warn(f"overlap={overlap} changes nothing on path={name!r}: it is for path 'fused'")
    known = get_args(PathName)
    require(name in known, f"path={name!r} must be 'auto' or one of {known}")
    if name in ("fused", "twin") and over_nodes:
        return NodesPath(config, group, overlap, use_kernels=name == "fused")
    if name in ("fused", "twin"):
        return SymmetricPath(config, group, overlap, use_kernels=name == "fused")
    require(
        config.capacity_factor is None,
        f"capacity_factor={config.capacity_factor} needs path 'fused' or 'twin'; {name!r} is dropless"
        + (obstacle and f", and {obstacle}"),
    )
    return CollectivePath(name, config, group)


def path_to_train(
    path: PathName | str, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None, *, replays: bool
) -> PathName | str:
    """Return ``path``, or ``plain`` for ``auto`` where few tokens train over nodes: there the host bounds the layers.

    Args:
        replays: Whether passes are replayed from CUDA graphs, where the rails are kernels.
    """
    nodes, chosen = group.nodes, path != "auto" or overlap is not None or config.capacity_factor is not None
    if chosen or nodes is None or group.device.type != "cuda" or nodes_obstacle(group):
        return path
    faster = "" if replays and nodes.legs is not None else why_plain_trains(problem_over(config, group))
    if faster:
        group.resolver.warn(faster)
    return "plain" if faster else path


def why_plain_trains(problem: Problem) -> str:
    """Return why launched passes of a layer over nodes train on path ``plain``, in words; empty where they do not."""
    inside, plain = training_times(problem, Rates())
    return (inside > plain) * (
        f"layers of {problem.num_tokens} tokens over nodes train on path 'plain': a forward and a backward pass are "
        f"expected to take {plain:.1f} ms there, and {inside:.1f} ms inside the nodes; train more tokens in a step, or "
        "replay steps from CUDA graphs, which needs comm.backend"
    )
