"""Comet inside torchtitan's trainer on CPU ranks, against torchtitan's own all-to-all dispatcher and experts.

Skipped without the package; ``make torchtitan`` installs it. Products are in float32 unless a test says otherwise.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pages import ROOT, commands
from ranks import in_ranks, run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torchtitan_cases import EXPERTS, FOLDER, in_float32, make_trainer, model_spec, prepare, train

from comet.errors import UnavailableError

needs_torchtitan = pytest.mark.skipif(
    not (FOLDER / "ready").exists(), reason="needs torchtitan in build/torchtitan: make torchtitan"
)
Steps = list[tuple[float, float]]
TIMEOUT_S = 1200  # a step takes .1 s on two quiet cores, and ten times that on a busy machine


def distance(found: Steps, expected: Steps) -> float:
    """The largest difference of a loss, or of a norm of gradients relative to its size."""
    assert len(found) == len(expected)
    pairs = zip(found, expected, strict=True)
    return max(max(abs(loss - other), abs(norm - size) / size) for (loss, norm), (other, size) in pairs)


def assert_rounding(found: Steps, expected: Steps, noise: float = 0.0) -> None:
    """Equal but for roundings: a few in float32, or four times what torchtitan differs from itself."""
    assert distance(found, expected) <= max(1e-5, 4 * noise), f"{noise=} {found=} {expected=}"


def described(trainer: Any) -> dict[str, tuple[Any, ...]]:
    """Name, shape, and place in the mesh of each parameter."""
    (model,) = trainer.model_parts
    return {
        name: (each.shape, each.dtype, each.placements, each.device_mesh.mesh_dim_names, each.device_mesh.mesh.tolist())
        for name, each in model.named_parameters()
        if isinstance(each, DTensor)
    }


def exported(trainer: Any) -> dict[str, Any]:
    """The shapes that torchtitan writes for Hugging Face, by name."""
    (model,) = trainer.model_parts
    adapter = trainer.config.model_spec.state_dict_adapter(trainer.model_config, trainer.config.hf_assets_path)
    return {name: value.shape for name, value in adapter.to_hf(dict(model.state_dict())).items()}


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.timeout(TIMEOUT_S)
@in_ranks(2, timeout=TIMEOUT_S)
def test_losses_of_fifty_steps(rank: int, world_size: int) -> None:
    """EP2. The yardstick is torchtitan without EP, which adds the same numbers in another order."""
    prepare(rank)
    in_float32()
    stock = make_trainer("qwen3", [], num_layers=1, expert_parallel_degree=2)
    ours = make_trainer("qwen3", [EXPERTS], num_layers=1, expert_parallel_degree=2)
    assert type(ours.model_parts[0].layers["0"].moe.routed_experts).__name__ == "CometRoutedExperts"
    assert described(ours) == described(stock)
    assert exported(ours) == exported(stock)
    found, expected = train(ours), train(stock)
    assert len(found) == 50
    assert found[-1][0] < found[0][0]
    assert_rounding(found, expected, distance(train(make_trainer("qwen3", [], num_layers=1)), expected))


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.timeout(TIMEOUT_S)
@in_ranks(2, timeout=TIMEOUT_S)
def test_compiled_blocks(rank: int, world_size: int) -> None:
    """torchtitan compiles each block as one graph, with the layer as an operator in it.

    Its attention would be compiled by Inductor, which has none for training on a CPU.
    """
    prepare(rank)
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import compile as compiling

    compiling._maybe_regional_inductor_backend = lambda model, backend: backend
    in_float32()
    fields = dict(steps=3, expert_parallel_degree=2)
    expected = train(make_trainer("qwen3", [EXPERTS], **fields))
    compiled = CompileConfig(enable=True, components=["model"], backend="aot_eager")
    assert_rounding(train(make_trainer("qwen3", [EXPERTS], compile=compiled, **fields)), expected)


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.timeout(TIMEOUT_S)
@in_ranks(2, timeout=TIMEOUT_S)
def test_families(rank: int, world_size: int) -> None:
    """Two steps of two accumulated batches: kept, recomputed wholly, recomputed in part; and without EP."""
    prepare(rank)
    in_float32()
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    for model in ("deepseek_v3", "gpt_oss", "kimi_k2_7"):
        fields = dict(steps=2, global_batch_size=8, expert_parallel_degree=2)
        expected = train(make_trainer(model, [], **fields))
        for memory in (None, FullAC.Config(), SelectiveAC.Config()):
            assert_rounding(train(make_trainer(model, [EXPERTS], activation_checkpoint=memory, **fields)), expected)
        fields |= dict(expert_parallel_degree=1)
        assert_rounding(train(make_trainer(model, [EXPERTS], **fields)), expected)


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.timeout(TIMEOUT_S)
def test_four_ranks(tmp_path: Path) -> None:
    """Run both in one start of ranks, which costs more than the steps."""
    run_ranks(_share, 4, tmp_path, timeout=TIMEOUT_S)


def _share(rank: int, world_size: int, folder: Path) -> None:
    prepare(rank)
    _pipeline()
    in_float32()
    _go_on(folder)


def _go_on(folder: Path) -> None:
    """EP2 x FSDP2: a checkpoint of the second of four steps goes on under the other experts."""
    layout = dict(steps=4, num_layers=1, expert_parallel_degree=2)
    for name, first, second in (("stock", [], [EXPERTS]), ("ours", [EXPERTS], [])):
        whole = train(make_trainer("qwen3", first, folder=folder / name, **layout))
        rest = train(make_trainer("qwen3", second, folder=folder / name, load_step=2, **layout))
        assert_rounding(rest, whole[2:])


def _pipeline() -> None:
    """PP2 x EP2 in bf16, as users train: the ranks of each stage make a group of their own.

    The yardstick is the difference that bf16 in place of float32 makes for the rest of torchtitan.
    """
    fields = dict(steps=2, pipeline_parallel_degree=2, expert_parallel_degree=2)
    exact = train(make_trainer("qwen3", [], **fields))
    fields |= dict(mixed_precision_param="bfloat16")
    expected = train(make_trainer("qwen3", [], **fields))
    assert_rounding(train(make_trainer("qwen3", [EXPERTS], **fields)), expected, distance(expected, exact))


def test_without_torchtitan_it_says_what_is_missing() -> None:
    with pytest.raises(UnavailableError, match=r"needs torchtitan 0\.3: pip install torchtitan==0\.3\.0"):
        import comet.integrations.torchtitan  # noqa: F401


def refused(call: Any, *words: str) -> None:
    """Check that a call raises ``ValueError`` with these words in its message."""
    with pytest.raises(ValueError) as caught:
        call()
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.timeout(TIMEOUT_S)
@in_ranks(2, timeout=TIMEOUT_S)
def test_what_is_refused(rank: int, world_size: int) -> None:
    prepare(rank)
    from torchtitan.models.common.moe import GroupedExperts

    from comet.integrations import torchtitan as ours
    from comet.integrations.torchtitan.routed import check_mesh

    for found in ("0.2.1", "0.4.0", "1.0"):
        refused(lambda found=found: ours.check_version(found), f"torchtitan={found} must be 0.3.x")
    config = model_spec("qwen3").model.layers[0].moe.routed_experts
    refused(lambda: ours.experts(config, reserved_sm=1), "reserved_sm=1 must be one of", "reserved_sms")
    refused(lambda: ours.experts(config, path="fast"), "path='fast' must be one of auto")
    refused(lambda: ours.experts(config, reserved_sms=-1), "reserved_sms=-1 must be at least 0")
    refused(lambda: ours.experts(config, timeout_s=0), "timeout_s=0 must be above 0")

    class Quantised(GroupedExperts.Config):
        pass

    inner = config.inner_experts
    config.inner_experts = Quantised(dim=inner.dim, hidden_dim=inner.hidden_dim, num_experts=inner.num_experts)
    refused(lambda: ours.experts(config), "inner_experts=", "Quantised must be one of GroupedExperts.Config")
    config.inner_experts = inner

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    weight = distribute_tensor(torch.zeros(4, 2, 2), mesh, [Shard(0)])
    check_mesh("w1_EFD", weight, mesh)
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    refused(lambda: check_mesh("w1_EFD", weight.redistribute(mesh, [Replicate()]), mesh), "w1_EFD", "Shard(0)")
    refused(lambda: check_mesh("w1_EFD", distribute_tensor(torch.zeros(4, 2, 2), other, [Shard(0)]), mesh), "tp=2")

    layers = dict(steps=1, num_layers=1)
    refused(lambda: make_trainer("qwen3", [EXPERTS], tensor_parallel_degree=2, **layers), "expert_parallel_degree=1")


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.timeout(TIMEOUT_S)
def test_commands_of_the_page_and_the_example(tmp_path: Path) -> None:
    """torchtitan parses the page's commands, and trains by the example on text of its kind."""
    run_ranks(_run_the_example, 2, tmp_path, timeout=TIMEOUT_S)


def _run_the_example(rank: int, world_size: int, folder: Path) -> None:
    prepare(rank)
    sys.path.append(str(ROOT / "docs/examples"))
    from torchtitan.config import ConfigManager
    from torchtitan.models import qwen3

    found = [shlex.split(line) for line in commands("docs/howto/torchtitan.md")]
    arguments = [words[words.index("torchtitan.train") + 1 :] for words in found]
    parsed = [ConfigManager().parse_args(each) for each in arguments]
    imports = [EXPERTS, (EXPERTS, {"reserved_sms": 16}), EXPERTS]
    assert [config.override.imports for config in parsed] == [[each] for each in imports]

    _write_assets(folder, rank)
    small = model_spec("qwen3", num_layers=1).model
    qwen3.qwen3_configs["debugmodel_moe"] = lambda **fields: small
    os.chdir(folder)
    sizes = "--training.steps 2 --training.seq-len 32 --training.local-batch-size 1".split()
    trainer = (
        ConfigManager().parse_args([*arguments[-1], *sizes, "--parallelism.spmd-backend", "partial_dtensor"]).build()
    )
    assert len(train(trainer)) == 2
    assert type(trainer.model_parts[0].layers["0"].moe.routed_experts).__name__ == "CometRoutedExperts"


def _write_assets(folder: Path, rank: int) -> None:
    """Write a tokenizer and text where torchtitan's debug configurations look for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    assets = folder / "tests" / "assets"
    if rank == 0:
        words = {f"w{number}": number for number in range(64)} | {"<unk>": 64, "<eos>": 65, "<bos>": 66}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        (assets / "tokenizer").mkdir(parents=True)
        tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
        special = dict(bos_token="<bos>", eos_token="<eos>")
        (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
        (assets / "c4_test").mkdir()
        text = " ".join(f"w{number % 64}" for number in range(400))
        (assets / "c4_test" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(8)))
    dist.barrier()
