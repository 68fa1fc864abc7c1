"""Missing experts computed on the host's cores, asked for by a GPU: launched, replayed, and without an answer."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cache_cases import PROFILE, SLOW_LINK, hosted_cache, resident_weights
from cached_layers import CUDA, D, E, K, case_of, draw_step, refill
from gemm_cases import assert_as_good
from gpus import captured
from torch import Tensor

from comet.decode import DecodeWeights, warp_decode_torch
from comet.decode.runners import LocalRunner
from comet.decode.twin import slot_weights
from comet.errors import HostComputeError
from comet.experts.cache import ExpertCache
from comet.experts.cached import CachedExperts
from comet.experts.host.cores import HostCores
from comet.experts.host.profile import HostProfile

pytestmark = pytest.mark.gpu
SEED = 5


@pytest.fixture
def made() -> torch.Generator:
    print("seed", SEED)
    return torch.Generator().manual_seed(SEED)


def opened(
    num_slots: int, num_tokens: int, profile: HostProfile | None = PROFILE, quantised: str = ""
) -> tuple[ExpertCache, HostCores, DecodeWeights]:
    """A cache, its cores, and the same experts as float64 on the CPU."""
    case = case_of(num_tokens, F=224, quantised=quantised, seed=SEED)
    cache, cores = hosted_cache(case, num_slots, profile, device=CUDA, dtype=torch.bfloat16)
    stored = resident_weights(case, dtype=torch.bfloat16)
    wide = zip(*(slot_weights(stored, slot, torch.float64) for slot in range(E)), strict=True)
    exact = DecodeWeights(**dict(zip(("w1", "w2"), map(torch.stack, wide), strict=True)), slots=stored.slots)
    return cache, cores, exact


def assert_close(output: Tensor, tokens: Tensor, ids: Tensor, weights: Tensor, exact: DecodeWeights) -> None:
    """Twice the error of plain torch in bfloat16 against float64."""
    inputs = tokens.cpu(), ids.cpu(), weights.cpu()
    expected = warp_decode_torch(inputs[0].double(), inputs[1], inputs[2].double(), exact)
    narrow = DecodeWeights(w1=exact.w1.bfloat16(), w2=exact.w2.bfloat16(), slots=exact.slots)
    assert_as_good("step", output.cpu(), warp_decode_torch(*inputs, narrow), expected)


@pytest.mark.parametrize("quantised", ["", "fp8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, K), (1, 11), (2, 9), (5, 20), (11, E)])
def test_steps_give_the_numbers_of_resident_experts(
    num_tokens: int, num_slots: int, quantised: str, made: torch.Generator
) -> None:
    cache, cores, exact = opened(num_slots, num_tokens, quantised=quantised)
    decode = LocalRunner(K, num_tokens).decode
    for _ in range(60):
        given = draw_step(made, num_tokens)
        assert_close(decode(*given, cache.weights), *given, exact)
    cores.check()
    hosted, seconds = cores.counts
    needed, fetched = cache.tables.totals[:2].tolist()
    assert 0 < hosted < needed - fetched + 1
    assert fetched > 0
    assert seconds > 0
    assert not (cache.tables.arriving == -2).any()
    cores.close()


def test_replayed_steps_give_the_numbers_of_resident_experts(made: torch.Generator) -> None:
    cache, cores, exact = opened(K + 2, 1, SLOW_LINK)
    cached = CachedExperts(cache, LocalRunner(K, 1), K)
    given = draw_step(made, 1)
    graph, out = captured(lambda: cached(given, cache.weights.w1, cache.weights.w2))
    for _ in range(200):
        refill(given, draw_step(made, 1, masked=False))
        graph.replay()
        assert_close(out, *given, exact)
    cores.check()
    assert cores.counts[0] > 200
    cores.close()


@pytest.mark.parametrize("quantised", ["", "mxfp4"])
def test_steps_in_waves_and_prompts_that_stream_between_others(quantised: str, made: torch.Generator) -> None:
    """Waves and streamed prompts leave no work for the host's cores."""
    cache, cores, exact = opened(6, 4, SLOW_LINK, quantised=quantised)
    cached, slots = CachedExperts(cache, LocalRunner(K, 4), K), cache.weights
    for num_tokens in (4, 60, 1, 20, 4):
        given, before = draw_step(made, num_tokens, masked=False), cores.counts[0]
        assert_close(cached(given, slots.w1, slots.w2), *given, exact)
        assert (cores.counts[0] > before) == (num_tokens == 1)
    assert int(cache.tables.totals[7]) == cores.counts[0]
    cores.check()
    cores.close()


def test_steps_without_waiting_for_the_host_in_between(made: torch.Generator) -> None:
    """The host launches ahead, so requests follow each other as fast as the process answers."""
    cache, cores, exact = opened(K, 1, SLOW_LINK)
    decode = LocalRunner(K, 1).decode
    steps = []
    for _ in range(300):
        given = draw_step(made, 1, masked=False)
        steps.append((decode(*given, cache.weights), *given))
    for step in steps:
        assert_close(*step, exact)
    cores.check()
    cores.close()


@pytest.fixture
def stopped() -> Iterator[tuple[ExpertCache, HostCores]]:
    cache, cores, _ = opened(K, 1, SLOW_LINK)
    assert cores.process is not None
    os.kill(cores.process.pid, signal.SIGSTOP)
    yield cache, cores
    os.kill(cores.process.pid, signal.SIGCONT)
    cores.close()


def test_an_answer_that_does_not_come_ends_the_step_by_its_deadline(stopped: tuple[ExpertCache, HostCores]) -> None:
    cache, cores = stopped
    cache.host = replace(cache.host, mail=cores.mail._replace(timeout_ns=10**8))
    cache.weights = replace(cache.weights, host=cache.host)
    decode = LocalRunner(K, 1).decode
    ids = torch.arange(K, dtype=torch.int32, device=CUDA)[None]
    tokens, weights = torch.ones(1, D, device=CUDA).bfloat16(), torch.ones(1, K, device=CUDA)
    assert decode(tokens, ids, weights, cache.weights).isnan().all(), "nobody takes this for a result"
    with pytest.raises(HostComputeError, match="of layer 0: the process is still at it"):
        cores.check()
    with pytest.raises(HostComputeError, match=r"within 60\.0 s"):
        cores.raise_if_failed()
    decode(tokens, ids, weights, cache.weights)
    torch.cuda.synchronize()


@pytest.mark.parametrize("quantised", ["", "fp8", "mxfp8", "mxfp4"])
def test_what_this_machine_costs(quantised: str) -> None:
    """The measured costs are positive."""
    _, cores, _ = opened(K, 4, None, quantised=quantised)
    print(quantised, cores.facts())
    assert cores.profile is not None
    assert cores.profile.link_ns > 0
    assert cores.profile.shared_link_ns > 0
    assert cores.profile.expert_ns > 0
    cores.close()
