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


def distance(found: Steps, expected: Steps) -> float:
    """The largest difference of a loss, or of a norm of gradients relative to its size."""
    assert len(found) == len(expected)
    pairs = zip(found, expected, strict=True)
    return max(max(abs(loss - other), abs(norm - size) / size) for (loss, norm), (other, size) in pairs)


def assert_rounding(found: Steps, expected: Steps, noise: float = 0.0) -> None:
    """Equal but for roundings: a few in float32, or four times as far as torchtitan is from itself."""
    assert distance(found, expected) <= max(1e-5, 4 * noise)


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
@in_ranks(2, timeout=590)
def test_losses_of_fifty_steps(rank: int, world_size: int) -> None:
    """EP2. The yardstick is torchtitan without EP, which adds the same numbers in another order."""
    prepare(rank)
    in_float32()
    stock = make_trainer("qwen3", [], expert_parallel_degree=2)
    ours = make_trainer("qwen3", [EXPERTS], expert_parallel_degree=2)
    assert described(ours) == described(stock)
    assert exported(ours) == exported(stock)
    expected = train(stock)
    noise = distance(train(make_trainer("qwen3", [])), expected)
    found = train(ours)
    assert len(found) == 50
    assert found[-1][0] < found[0][0]
    assert_rounding(found, expected, noise)
    moe = ours.model_parts[0].layers["0"].moe
    assert type(moe.routed_experts).__name__ == "CometRoutedExperts"


@pytest.mark.slow
@needs_torchtitan
def test_checkpoints_go_on_under_the_other(tmp_path: Path) -> None:
    """EP2 x FSDP2, and at the end a checkpoint of EP2 x FSDP2 under EP4."""
    run_ranks(_go_on, 4, tmp_path, timeout=590)


def _go_on(rank: int, world_size: int, folder: Path) -> None:
    prepare(rank)
    in_float32()
    layout = dict(expert_parallel_degree=2, num_layers=1)
    whole = train(make_trainer("qwen3", [], steps=6, **layout))
    for name, first, second in (("stock", [], [EXPERTS]), ("ours", [EXPERTS], [])):
        begun = train(make_trainer("qwen3", first, steps=3, folder=folder / name, **layout))
        went_on = train(make_trainer("qwen3", second, steps=6, folder=folder / name, **layout))
        assert len(went_on) == 3, "the checkpoint was not found"
        assert_rounding(begun + went_on, whole)


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.parametrize("model", ["deepseek_v3", "gpt_oss", "kimi_k2_7"])
@in_ranks(2, timeout=590)
def test_families(rank: int, world_size: int, model: str) -> None:
    """Two steps of two accumulated batches: kept, recomputed wholly, recomputed in part; and without EP."""
    from importlib import import_module

    prepare(rank)
    in_float32()
    checkpointing = import_module("torchtitan.distributed.activation_checkpoint")
    fields = dict(steps=2, global_batch_size=8, expert_parallel_degree=2)
    expected = train(make_trainer(model, [], **fields))
    for memory in (None, checkpointing.FullAC.Config(), checkpointing.SelectiveAC.Config()):
        assert_rounding(train(make_trainer(model, [EXPERTS], activation_checkpoint=memory, **fields)), expected)
    fields |= dict(expert_parallel_degree=1)
    assert_rounding(train(make_trainer(model, [EXPERTS], **fields)), expected)


@pytest.mark.slow
@needs_torchtitan
@in_ranks(4, timeout=590)
def test_pipeline(rank: int, world_size: int) -> None:
    """PP2 x EP2 in bf16, as users train: the stages' ranks make their groups apart. Each rank is compared."""
    prepare(rank)
    fields = dict(steps=3, pipeline_parallel_degree=2, expert_parallel_degree=2, mixed_precision_param="bfloat16")
    expected = train(make_trainer("qwen3", [], **fields))
    in_float32()
    exact = train(make_trainer("qwen3", [], **fields | {"mixed_precision_param": "float32"}))
    found = train(make_trainer("qwen3", [(EXPERTS, {"path": "plain"})], **fields))
    assert_rounding(found, exact, distance(expected, exact))


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
@in_ranks(2, timeout=300)
def test_what_is_refused(rank: int, world_size: int) -> None:
    prepare(rank)
    from torchtitan.models.common.moe import GroupedExperts

    from comet.integrations import torchtitan as ours
    from comet.integrations.torchtitan.routed import local_part

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
    assert local_part("w1_EFD", weight, mesh).shape == (2, 2, 2)
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    refused(lambda: local_part("w1_EFD", weight.redistribute(mesh, [Replicate()]), mesh), "w1_EFD", "Shard(0)")
    refused(lambda: local_part("w1_EFD", distribute_tensor(torch.zeros(4, 2, 2), other, [Shard(0)]), mesh), "tp=2")

    layers = dict(steps=1, num_layers=1)
    refused(lambda: make_trainer("qwen3", [EXPERTS], tensor_parallel_degree=2, **layers), "expert_parallel_degree=1")
    layer = ours.experts(config).build()
    tokens, ids = torch.zeros(1, 4, inner.dim), torch.zeros(1, 4, 1, dtype=torch.int64)
    with pytest.raises(Exception, match=r"compile\.components must be without 'model'"):
        torch.compile(layer, backend="eager", fullgraph=True)(tokens, ids.float(), ids, torch.zeros(8))


@pytest.mark.slow
@needs_torchtitan
def test_commands_of_the_page_and_the_example(tmp_path: Path) -> None:
    """torchtitan parses the page's commands, and trains by the example on text of its kind."""
    run_ranks(_run_the_example, 2, tmp_path, timeout=590)


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
