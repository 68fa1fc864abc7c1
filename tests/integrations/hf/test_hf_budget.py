"""``load_pretrained`` with a budget: the same answers, experts read one by one, and ahead of their step."""

import copy
import logging
import os
import re
import resource
import threading
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_cases import decide_as_on_a_gpu
from generate_cases import drafting_rounds
from hf_cases import (
    CountedReads,
    answers,
    assert_ranks_agree,
    edit_state,
    greedy,
    logits_with_cache,
    make_group,
    prompt,
    save_fused,
    tiny_config,
    tiny_model,
)
from hf_fp8_cases import WHOLE, publish, published, stock
from ranks import in_ranks, run_ranks
from safetensors.torch import load_file
from tiers import slow
from torch import Tensor

import comet.experts.store
from comet.config import SpeculationConfig
from comet.experts.cached import probable
from comet.generation.hf import HFEngine
from comet.integrations import hf
from comet.integrations.hf.convert import require_same_model
from comet.integrations.hf.families import Family
from comet.integrations.hf.fp8 import FP8Experts
from comet.integrations.hf.stored_experts import LayerFiles, StoredExperts, cache_report
from comet.quantization.formats import quantize_mx
from comet.router.router import Router

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


STORES: dict[str, dict[str, Any]] = {
    "host": {},
    "file": {"expert_store": "file", "host_budget": 0.6},
    "mxfp8": {"expert_dtype": "mxfp8"},
    "mxfp4": {"expert_dtype": "mxfp4"},
}
STORES["mxfp4 in files"] = STORES["mxfp4"] | STORES["file"]
WHOLE_STORE = {"host_budget": None, "expert_store": "host"}
BYTES = {None: 4, "mxfp8": 1 + 1 / 32, "mxfp4": 1 / 2 + 1 / 32}  # bytes of a number, with its share of a scale
EXPERT = 3 * 32 * 32 * 4
TWO = dict(num_experts_per_tok=2, moe_intermediate_size=64)  # experts twice as large


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    tiny_model("mixtral").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_shared_experts_run_by_themselves(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = hf.load_pretrained(tmp_path, make_group(model), expert_budget=0.5)
    assert torch.equal(greedy(loaded, prompt(2, 9)), greedy(model, prompt(2, 9)))
    modules = [module for module in loaded.modules() if isinstance(module, StoredExperts)]
    assert len(modules) == len(Family.of_config(model.config).experts)
    assert all(module.shared is None for module in modules)


def test_block_fp8_is_dequantised_as_it_is_read(whole):
    for store in ("host", "file"):
        loaded = hf.load_pretrained(whole, expert_budget=0.5, **STORES[store])
        assert torch.equal(greedy(loaded, prompt(1, 3)), greedy(stock(whole), prompt(1, 3)))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A folder in block FP8 of a model without shared experts, which would run otherwise than with all experts."""
    return published(tmp_path_factory.mktemp("fp8"), "qwen3_moe", hidden_size=160, moe_intermediate_size=256)


FP8_EXPERT = 3 * 160 * 256 + 4 * (4 * 2 + 2 * 2)  # elements of a byte, and their scales


@pytest.mark.parametrize("store", ["host", "file", slow("pageable")])
def test_block_fp8_answers_as_all_of_it_does_bit_for_bit(store, fp8, monkeypatch):
    """Experts are kept as stored, and no part of a file is read before its use."""
    whole = hf.load_pretrained(fp8, keep_fp8=True, decode_tokens=6)
    if store == "pageable":
        memory = comet.experts.store.host_memory
        monkeypatch.setattr(comet.experts.store, "host_memory", lambda *given: (memory(*given)[0], False))
    settings = dict(keep_fp8=True, decode_tokens=6, expert_budget=0.5, **STORES.get(store, {}))
    with CountedReads() as counted:
        loaded = hf.load_pretrained(fp8, **settings)
        read = counted.expert_bytes()
        assert torch.equal(*(answers(each, prefills=(1, 12)) for each in (loaded, whole)))
    report = cache_report(loaded)
    cache = next(module for module in loaded.modules() if isinstance(module, StoredExperts)).path.cache
    assert cache.weights.w1.dtype == torch.float8_e4m3fn
    assert (report.staged_bytes > 0) == (store != "host")
    assert report.fetched_bytes == report.fetched * FP8_EXPERT
    assert report.needed > report.fetched > 2 * report.slots, "slots were given away"
    if store == "host":
        kept = next(module for module in whole.modules() if isinstance(module, FP8Experts))
        assert torch.equal(cache.host.w1.view(torch.uint8), kept.gate_up_proj.view(torch.uint8))
        for weight, name in (("w1", "gate_up_proj"), ("w2", "down_proj")):
            assert torch.equal(getattr(cache.host, f"{weight}_scales"), kept.get_parameter(f"{name}_scale_inv"))
    else:
        assert set(cache.weights.named_parts) == {"w1", "w2", "w1_scales", "w2_scales"}
    if store == "file":
        assert read == 0
        assert counted.expert_bytes() <= report.staged_bytes < report.fetched_bytes
        assert max(size for name, size in counted.reads if ".experts." in name) == 160 * 256, "one matrix, in FP8"


def test_a_scale_in_a_file_that_is_no_number_is_named_when_it_is_read(fp8, tmp_path):
    name = "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv"
    edit_state(copytree(fp8, tmp_path, dirs_exist_ok=True), lambda state: state[name].view(-1)[-1].fill_(torch.nan))
    loaded = hf.load_pretrained(tmp_path, keep_fp8=True, expert_budget=0.5, **STORES["file"])
    message = r"experts\.5\.up_proj\.weight_scale_inv holds nan, must be finite and not negative"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            greedy(loaded, prompt(8, 9))


MB = 2**20


def data_bytes() -> int:
    """Private writable memory of this process, which is what ``RLIMIT_DATA`` limits."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    return int(found.split()[1]) * 1024


def load_capped(rank: int, world_size: int, small: str, large: str, room: int, settings: dict) -> list[int]:
    """Load ``small`` to start all threads, then ``large`` with ``room`` more bytes than now; returns its tokens."""
    torch.set_num_threads(1)
    threading.stack_size(MB // 4)  # each thread that watches reads has one, and all of it counts
    greedy(hf.load_pretrained(small, expert_budget=0.5), prompt(1, 3))
    before = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + room, resource.RLIM_INFINITY))
    try:
        tokens = greedy(hf.load_pretrained(large, **settings), prompt(1, 3))[0].tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(f"{data_bytes() - before:,} bytes more, {room:,} allowed")
    return tokens


@pytest.mark.parametrize(("store", "held"), [("host", 1.25), slow("file", 0.5), ("file in fp8", 0.5)])
def test_a_folder_larger_than_both_budgets_is_never_held_twice(store, held, mixtral, tmp_path):
    """The memory of the process is limited to what the budgets allow, and to the mapping of the folder's files."""
    is_fp8 = store.endswith("fp8")
    count = 32 if is_fp8 else 16
    sizes = dict(hidden_size=256, moe_intermediate_size=256, num_experts=count, num_hidden_layers=2, mlp_only_layers=[])
    model = tiny_model("qwen3_moe", **sizes)
    model.save_pretrained(tmp_path)
    if is_fp8:
        publish(tmp_path)
        model = stock(tmp_path)
    experts, folder = 2 * 3 * 256**2 * (32 if is_fp8 else 16 * 4), (tmp_path / "model.safetensors").stat().st_size
    files = {"expert_store": "file", "host_budget": 0.25, "keep_fp8": is_fp8}
    settings = {"expert_budget": 0.25, **(files if store != "host" else {})}
    room = folder + int(held * experts) + (10 if is_fp8 else 3) * MB  # all else takes 6.5 to 8 in FP8, a layer 6
    assert run_ranks(load_capped, 1, str(mixtral), str(tmp_path), room, settings) == [
        greedy(model, prompt(1, 3))[0].tolist()
    ]


def refuse(folder: Path, message: str, error: type[Exception] = ValueError, **settings) -> None:
    for store in ("host", "file"):
        with pytest.raises(error, match=message):
            hf.load_pretrained(folder, **{"expert_budget": 0.5, **STORES[store], **settings})


@pytest.mark.parametrize("store", ["host", "file"])
def test_adapters_of_attention_are_as_on_the_stock_model(store, tmp_path):
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    base, ids = tiny_model("qwen3_moe"), prompt(1, 9)
    base.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(base, settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    wanted = logits_with_cache(adapted, ids, 5)
    load = partial(hf.load_pretrained, tmp_path / "base", expert_budget=0.5, **STORES[store])
    model = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter")
    torch.testing.assert_close(logits_with_cache(model, ids, 5), wanted)
    model.save_pretrained(tmp_path / "again")
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[1][name], tensor) for name, tensor in saved[0].items())
    with pytest.raises(ValueError, match=r"^state_dict: experts are in a store and no parameters"):
        torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.testing.assert_close(logits_with_cache(model.merge_and_unload(), ids, 5), wanted)
    by_transformers = load()
    by_transformers.load_adapter(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_with_cache(by_transformers, ids, 5), wanted)


def test_a_model_with_a_store_keeps_its_type_and_device(mixtral):
    model = hf.load_pretrained(mixtral, expert_budget=0.5)
    expected, kinds = answers(model), {name: each.dtype for name, each in model.named_parameters()}
    copied = copy.deepcopy(model)
    for whole in (model, copied, torch.nn.Sequential(model)):
        for call in (whole.half, whole.bfloat16, whole.double, partial(whole.to, torch.float16)):
            with pytest.raises(
                ValueError, match=r"^dtype=torch\.\w+ of a model with an expert_budget must stay torch\.f"
            ):
                call()
        with pytest.raises(
            ValueError, match=r"^device=meta of a model with an expert_budget must stay cpu: .* device=meta"
        ):
            whole.to("meta")
    for part in (model.model, model.model.layers[1], model.model.layers[1].mlp.experts):
        with pytest.raises(ValueError, match="of a model with an expert_budget must stay"):
            part.half()
    for same in (model.float, model.cpu, partial(model.to, "cpu", torch.float32), copied.float):
        assert same() in (model, copied)
    assert torch.equal(answers(model), expected)
    assert kinds == {name: each.dtype for name, each in model.named_parameters()}


@pytest.mark.parametrize("store", ["host", "file", slow("mxfp4 in files"), slow("host's cores")])
def test_routers_may_choose_more_experts_than_when_the_model_was_loaded(store, tmp_path):
    """``top_k`` is raised up to the number of slots, beyond it, and for one token beyond waves."""
    tiny_model("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[]).save_pretrained(tmp_path)  # K = 4 of 8 experts
    settings = STORES.get(store, {"host_cores": "1"})
    for decode_tokens in (16, 1):
        budgets = dict(expert_budget=0.75, **settings), dict(expert_budget=1.0, **settings | WHOLE_STORE)
        models = [hf.load_pretrained(tmp_path, decode_tokens=decode_tokens, **each) for each in budgets]
        for top_k in (4, 6, 8):
            for layer in (layer for model in models for layer in model.model.layers):
                layer.mlp.gate.top_k = top_k
            for ids, prefill in ((prompt(1, 12), 1), (prompt(3, 9), 5)):
                torch.testing.assert_close(*(logits_with_cache(model, ids, prefill) for model in models))


@pytest.mark.parametrize("budget", [float("nan"), 0.0, -1.0, 0.2, 100.0])
def test_a_budget_that_cannot_be(budget, mixtral):
    with CountedReads() as counted:
        refuse(mixtral, "^expert_budget=", expert_budget=budget)
    assert not counted.reads


def test_what_a_budget_does_not_go_with(mixtral):
    nodes = SimpleNamespace(
        comm=SimpleNamespace(memory_obstacle=""), nodes=None, nodes_obstacle="a group spans unequal nodes"
    )
    refuse(
        mixtral, "expert_budget needs warp decode on all ranks: a group spans unequal", NotImplementedError, group=nodes
    )
    refuse(
        mixtral, "expert_policy is no longer a setting: leave it out: the expert used longest ago", expert_policy="lfu"
    )
    refuse(mixtral, "decode_tokens=0 must be at least 1 with an expert_budget", decode_tokens=0)
    loaded = hf.load_pretrained(mixtral, expert_budget=0.5)
    for save in (loaded.state_dict, loaded.model.layers[0].state_dict, partial(loaded.save_pretrained, mixtral)):
        with pytest.raises(ValueError, match=r"^(state_dict|save_pretrained): experts are in a store and no param"):
            save()


def test_a_copied_model_reads_the_same_store(mixtral):
    loaded = hf.load_pretrained(mixtral, expert_budget=0.5, **STORES["file"])
    twin = copy.deepcopy(loaded)
    assert torch.equal(greedy(twin, prompt(1, 4)), greedy(loaded, prompt(1, 4)))
    assert cache_report(twin) == cache_report(loaded)


def cut(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 2)


def rewrite(file: Path) -> None:
    before = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "source", "settings"),
    [(cut, "mixtral", {}), (Path.unlink, "mixtral", {}), (rewrite, "fp8", {"keep_fp8": True})],
)
def test_a_file_that_changed_after_it_was_opened(change, source, settings, tmp_path, request):
    folder = copytree(request.getfixturevalue(source), tmp_path, dirs_exist_ok=True)
    loaded = hf.load_pretrained(folder, expert_budget=0.5, **STORES["file"], **settings)
    greedy(loaded, prompt(1, 3))
    change(tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.safetensors must stay as it was when it was opened: it changed or is"
    ):
        greedy(loaded, prompt(8, 9))  # needs all experts, of which host memory holds 60 %


@pytest.mark.parametrize(("change", "expert"), [(cut, 1), (rewrite, 8), (Path.unlink, 8)])
def test_a_file_that_changes_while_it_is_loaded(change, expert, mixtral, tmp_path, monkeypatch):
    """The file changes before an expert is read, or after the last expert was read."""
    file, reads, read = copytree(mixtral, tmp_path, dirs_exist_ok=True) / "model.safetensors", [], LayerFiles.read

    def read_and_change(layer, *given):
        if len(reads) == expert:
            change(file)
        reads.append(given[0])
        read(layer, *given)
        if len(reads) == expert == 8:
            change(file)

    monkeypatch.setattr(LayerFiles, "read", read_and_change)
    with pytest.raises(ValueError, match="must stay as it was when it was opened"):
        hf.load_pretrained(tmp_path, expert_budget=0.5)
    assert len(reads) == min(expert + 1, 8)


DRAFTS = SpeculationConfig(draft_experts=(1,), tau=0.0)
FAMILIES = {"qwen3_moe": {"num_hidden_layers": 4}, "deepseek_v3": {}}  # the second layer, and the first, are dense


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, **FAMILIES[request.param]).save_pretrained(made)
    return made


def load(folder: Path, *, prefetch: bool | str) -> Any:
    return hf.load_pretrained(folder, expert_budget=0.5, expert_prefetch=prefetch)


def test_answers_are_those_without_it_bit_for_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` is no prefetch on a CPU and prefetch on a GPU; both give the same bits in steps, drafts and prompts."""
    models = [load(folder, prefetch="auto")]
    decide_as_on_a_gpu(monkeypatch)
    models.append(load(folder, prefetch="auto"))
    assert [cache_report(model).prefetch for model in models] == [False, True]
    assert torch.equal(*[greedy(model, prompt(2, 9)) for model in models])
    engines = [HFEngine(model, speculation=DRAFTS) for model in models]
    for first, second in zip(*(drafting_rounds(engine, 4) for engine in engines), strict=True):
        assert torch.equal(first, second)
    without, report = (cache_report(model) for model in models)
    assert (without.prefetched, without.prefetch_precision) == (0, None)
    assert report.needed == without.needed
    assert report.prefetched >= report.prefetched_needed > 0
    assert 0 < report.prefetch_precision <= 1
    assert report.fetched < without.fetched, "they did not miss"


def test_a_layer_is_asked_what_the_gate_behind_it_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate of the next layer with experts gets the tokens of this layer's experts."""
    asked: list[tuple[Tensor, Tensor]] = []

    def probable_and_note(router: Router, tokens: Tensor) -> Tensor:
        asked.append((tokens.clone(), probable(router, tokens)))
        return asked[-1][1]

    monkeypatch.setattr("comet.experts.paths.probable", probable_and_note)
    model = load(folder, prefetch=True)
    blocks = [block.mlp for block in model.model.layers if hasattr(block.mlp, "experts")]
    with torch.no_grad():
        model(prompt(1, 3))
        assert len(asked) == len(blocks) - 1
        for block, (tokens, guessed) in zip(blocks[1:], asked, strict=True):
            chosen = block.gate(tokens)[2]
            assert torch.equal(chosen.int().sort(dim=1).values, guessed.sort(dim=1).values)


def test_a_gate_without_a_weight_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("comet.integrations.hf.modules.GATES", ("up_proj",))
    assert load(folder, prefetch=False) is not None
    with pytest.raises(ValueError, match=r"mlp\.up_proj \(Identity\) must have a weight .* expert_prefetch=false"):
        load(folder, prefetch=True)
    decide_as_on_a_gpu(monkeypatch)
    with caplog.at_level(logging.WARNING, "comet"):
        assert not cache_report(load(folder, prefetch="auto")).prefetch
    (record,) = caplog.records
    assert re.search(r"expert_prefetch=auto prefetches no expert: .*mlp\.up_proj \(Identity\)", record.message)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {style: tmp_path_factory.mktemp("folder") for style in ("one by one", "fused")}
    tiny_model("qwen3_moe", **TWO).save_pretrained(found["one by one"], max_shard_size="30KB")
    save_fused(tiny_model("qwen3_moe", **TWO), found["fused"])
    return found


@pytest.mark.parametrize(
    ("ep", "tp", "node_size", "cases"),
    [
        (1, 1, None, {"host": "one by one", "file": "fused", "mxfp8": "one by one", "mxfp4 in files": "one by one"}),
        (2, 1, None, {"host": "one by one", "file": "fused"}),
        (2, 1, 1, {"host": "one by one", "file": "fused"}),
        slow(1, 2, None, {"host": "fused", "mxfp4": "one by one"}),
        slow(2, 2, None, {"file": "fused", "mxfp4": "one by one"}),
        slow(2, 2, 2, {"file": "fused", "mxfp4": "one by one"}),
    ],
)
@in_ranks("ep tp", timeout=300)
def test_ranks_answer_as_with_all_experts(
    rank: int, world_size: int, ep: int, tp: int, node_size: int | None, cases: dict[str, str], folders: dict[str, Path]
) -> None:
    """Models with some experts in slots answer as with all of them; experts are read and quantised one by one."""
    for store, style in cases.items():
        folder = folders[style]
        group, settings = make_group(tiny_config("qwen3_moe", **TWO), ep, tp, node_size=node_size), STORES[store]
        dtype, in_files = settings.get("expert_dtype"), "expert_store" in settings
        with CountedReads() as counted:
            budgeted = hf.load_pretrained(folder, group, expert_budget=0.75, **settings)
            reads = [num_bytes for name, num_bytes in counted.reads if ".experts." in name]
        whole = hf.load_pretrained(folder, group)
        assert type(budgeted) is type(whole)
        held = {name for name, _ in whole.named_parameters() if ".experts." not in name}
        assert {name for name, _ in budgeted.named_parameters()} == held
        for name, weight in whole.named_parameters() if dtype else ():
            if ".experts." in name:
                weight.data.copy_(quantize_mx(weight.data, dtype).dequantize())
        found = answers(budgeted)
        assert torch.equal(found, answers(whole)), store
        assert_ranks_agree(found, store)
        report = cache_report(budgeted)
        assert cache_report(whole) is None
        assert report.slots == 8 // ep * 3 // 4
        assert report.needed > report.fetched > 2 * report.slots, "slots were given away"
        assert report.fetched_bytes == report.fetched * (2 * EXPERT // 4 // tp) * BYTES[dtype]
        assert sum(reads) == (0 if in_files else 2 * 8 * 2 * EXPERT // (ep * tp)), "its own part, once"
        assert in_files or not dtype or max(reads) == 2 * EXPERT // 3 // tp, "one matrix at a time"
        assert not in_files or 0 < report.staged_bytes < report.fetched_bytes
        group.close()


@pytest.mark.parametrize(("tp", "store"), [slow(1, "file"), slow(2, "host")])
@in_ranks(2, timeout=300)
def test_block_fp8_is_kept_over_ranks(rank: int, world_size: int, whole: Path, tp: int, store: str) -> None:
    group = make_group(tiny_config("deepseek_v3", **WHOLE), 2 // tp, tp)
    budget = {"expert_budget": 0.5 * tp, **STORES[store]}
    models = [hf.load_pretrained(whole, group, keep_fp8=True, **each) for each in ({}, budget)]
    tokens = [greedy(model, prompt(1, 3)) for model in models]
    assert torch.equal(*tokens)
    assert_ranks_agree(tokens[0], store)
    report = cache_report(models[1])
    assert report.fetched > 0
    assert (report.staged_bytes > 0) == (store == "file")
    group.close()


@in_ranks(2)
def test_ranks_agree_where_one_cannot_pin(rank: int, world_size: int, folders: dict[str, Path]) -> None:
    memory = comet.experts.store.host_memory
    if rank == 1:
        comet.experts.store.host_memory = lambda *given: (memory(*given)[0], False)
    group = make_group(tiny_config("qwen3_moe", **TWO), 2, 1)
    loaded = hf.load_pretrained(folders["fused"], group, expert_budget=0.5)
    require_same_model(group, loaded)
    assert torch.equal(greedy(loaded, prompt(2, 9)), greedy(tiny_model("qwen3_moe", **TWO), prompt(2, 9)))
    assert cache_report(loaded).staged_bytes > 0, "the host copies on both, which then take equal steps"
    group.close()


@pytest.mark.parametrize("store", STORES)
def test_a_model_made_in_one_mode_is_used_in_the_other(store: str, tmp_path: Path) -> None:
    tiny_model("qwen2_moe").save_pretrained(tmp_path)
    settings: dict[str, Any] = dict(expert_budget=0.5) | STORES[store]

    def tokens(model: Any) -> Tensor:
        return torch.cat([model(prompt(1, length)).logits for length in (1, 3, 70)], dim=1)

    for made in (True, False):
        with torch.inference_mode(made):
            model = hf.load_pretrained(tmp_path, **settings)
        found = []
        for used in (not made, made, not made):
            with torch.inference_mode(used), torch.no_grad():
                found.append(tokens(model))
        for each in found[1:]:
            torch.testing.assert_close(each, found[0])
        hf.check(model)
