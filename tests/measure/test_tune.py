"""The ``tune`` task: a point in words, regrets, what is kept, and the command on two CPU ranks.

A candidate that meets a deadline while it is measured fails alone: the ranks recover and measure the others.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from late import hurry
from ranks import run_ranks
from torch import Tensor
from training_cases import Rank

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.errors import NothingMeasuredError
from comet.jobs.config import JobConfig
from comet.launch.cli import main
from comet.launch.config import compose, make_job
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.paths import ExpertPath, make_path
from comet.measure import layers as measure
from comet.measure import tune
from comet.measure.layers import measure_layer
from comet.measure.tune import Tuned, regret_text, regrets
from comet.tuner.problem import Machine, Problem
from comet.tuner.profile import Measured, ProfileEntry, ProfileKey, ProfileStore

MODELS = {
    "few": MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2, expert_bias=True),
    "many": MoEConfig(hidden_size=64, ffn_size=32, num_experts=8, top_k=1),
}


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "layers_of", lambda names, job: {name: MODELS[name] for name in names})


def job_of(folder: Path, *overrides: str) -> JobConfig:
    return make_job(compose(["model=tiny", f"tune.profiles={folder}", "tune.rounds=1", *overrides]), 1)


def tuned(num_tokens: int, times: dict[OverlapConfig | None, float | None]) -> Tuned:
    problem = Problem(MODELS["many"], ParallelConfig(ep=2), num_tokens, torch.bfloat16)
    return Tuned(problem, tuple(Measured(setting=setting, ms=ms, failure="" if ms else "died")
                                for setting, ms in times.items()))  # fmt: skip


def store_of(folder: Path, *points: Tuned) -> ProfileStore:
    store = ProfileStore.load(folder / "p.json", "cpu")
    for point in points:
        key = ProfileKey.create(point.problem, "cpu")
        store.put(ProfileEntry(key=key, measured=point.measured, commit="abc", date="2026-11-20"))
    return store


ONE, SPLIT = OverlapConfig(num_panels=1), OverlapConfig(comm_blocks=8, num_panels=1)  # the layer is one column block


def test_a_point_in_words_and_in_json() -> None:
    point = tuned(40, {None: 9.0, SPLIT: None, ONE: 1.5})
    title, head, *rows = point.text().splitlines()
    assert title == "ep=2, tp=1, num_experts=8, top_k=1, hidden_size=64, ffn_size=32, tokens=40, dtype=bfloat16"
    assert head.split() == ["candidate", "ms"]
    assert [row.split("  ")[0] for row in rows] == ["1 panel", "plain", "8 comm blocks, 1 panel"]
    assert [row.split()[-1] for row in rows] == ["kept", "9.000", "died"]
    facts = json.loads(json.dumps(point.facts()))
    assert facts["chosen"] == facts["candidates"][0]["setting"] == {"comm_blocks": 0, "num_panels": 1}
    assert [item["measured_ms"] for item in facts["candidates"]] == [1.5, 9.0, None]
    assert [item["failure"] for item in facts["candidates"]] == ["", "", "died"]


def test_regret_of_the_default_and_of_the_nearest_entry(tmp_path: Path) -> None:
    small, large = tuned(4096, {ONE: 1.0, SPLIT: 1.25, None: 4.0}), tuned(8192, {ONE: 2.2, SPLIT: 2.0, None: 8.0})
    alone = tuned(64, {SPLIT: 1.0, None: 4.0})
    found = regrets([small, large, alone], store_of(tmp_path, small, large, alone))
    assert found == {
        "default": {"mean": pytest.approx(1.05), "worst": pytest.approx(1.1), "points": 2},
        "nearest": {"mean": pytest.approx(1.175), "worst": 1.25, "points": 2},
    }
    assert regret_text(found).splitlines() == [
        "regret: time of the choice over the best measured",
        "default  mean 1.050, worst 1.100, 2 points",
        "nearest  mean 1.175, worst 1.250, 2 points",
    ]
    none = regrets([alone], store_of(tmp_path / "alone", alone))
    assert [values["points"] for values in none.values()] == [0, 0]
    assert regret_text(none).splitlines() == ["regret: time of the choice over the best measured"]


@pytest.mark.slow
def test_the_command_on_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["tune", "tune.rounds=2", f"tune.profiles={tmp_path}", "tune.tokens=[48,8]", "parallel.ep=2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["regrets"].keys() == {"default", "nearest"}
    assert found["regrets"]["default"]["points"] == 2
    assert sum(line.startswith("candidate ") for line in lines) == 2
    assert sum(line.startswith("tiny, ") and line.endswith(" s") for line in lines) == 2, "seconds of each point"
    assert 0 < sum(point["seconds"] for point in found["points"]) <= found["seconds"] + 0.02, "each is rounded"
    assert "no profile is stored: times of CPU ranks are noise; tune on GPUs" in lines
    assert (found["profile"], list(tmp_path.iterdir())) == (None, [])


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU pass for a device whose times count."""
    monkeypatch.setattr(tune.Machine, "of", lambda device: Machine(name="fake"))


def test_times_of_cpu_ranks_are_not_stored_nor_their_folder_made(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    facts = tune.tune_job(job_of(folder, "tune.models=[few]", "tune.tokens=[16]"), Rank())
    assert (facts["profile"], folder.exists()) == (None, False)


def test_winners_are_stored_for_a_device_whose_times_count(tmp_path: Path, as_gpu: None) -> None:
    facts = tune.tune_job(job_of(tmp_path, "tune.models=[few]", "tune.tokens=[48,8]"), Rank())
    path = tmp_path / "fake_x1.json"
    assert facts["profile"] == str(path)
    entries = ProfileStore.load(path, "fake").entries
    assert {key.tokens: entry.winner.ms for key, entry in entries.items()} == {
        tokens: point["candidates"][0]["measured_ms"] for tokens, point in zip((64, 8), facts["points"], strict=True)
    }
    assert {entry.kernels for entry in entries.values()} == {"triton"}  # there is no CUDA C++ on a CPU


def test_a_run_says_what_it_compiles_and_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comet.utils.progress.LOG_INTERVAL_S", 0.0)
    tune.tune_job(job_of(tmp_path, "tune.models=[few]", "tune.tokens=[16,4]"), Rank())
    err = capfd.readouterr().err
    for done, tokens in ((0, 16), (1, 4)):
        point = rf"comet: {done} of 2 points measured, [\d:]+ so far, [\d:?]+ left; few, {tokens} tokens"
        assert re.search(rf"^{point}$", err, re.MULTILINE)
        assert re.search(rf"^{point}, compiling candidate 2 of \d+$", err, re.MULTILINE)
        assert re.search(rf"^{point}, timing \d+ candidates, round 2$", err, re.MULTILINE)


def test_a_point_of_which_nothing_runs_is_told_and_a_run_of_such_points_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_wide(name: str, moe: MoEConfig, *others) -> ExpertPath:
        if moe.hidden_size == 32:
            raise RuntimeError("no resources")
        return make_path(name, moe, *others)

    monkeypatch.setattr("comet.measure.layers.make_path", only_wide)
    facts = tune.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[16]"), Rank())
    failed, ran = facts["points"]
    reason = f"none of {failed['failure'].split()[2]} settings ran, the first: RuntimeError: no resources"
    assert failed == {"model": "few", "tokens": 16, "failure": reason}
    assert ran["model"] == "many"
    assert f"few, 16 tokens: {reason}" in capfd.readouterr().out
    with pytest.raises(NothingMeasuredError, match=r"^tune: none of 1 points ran, the first: none of \d+ settings ran"):
        tune.tune_job(job_of(tmp_path, "tune.models=[few]", "tune.tokens=[16]"), Rank())


def test_an_interrupted_run_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_gpu: None
) -> None:
    measure_layer, done = tune.measure_layer, []

    def stops_at_the_third(problem: Problem, *others, **named) -> tuple[Measured, ...]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(problem)
        return measure_layer(problem, *others, **named)

    monkeypatch.setattr(tune, "measure_layer", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        tune.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[16,4]"), Rank())
    entries = ProfileStore.load(tmp_path / "fake_x1.json", "fake").entries
    assert {(key.hidden_size, key.tokens) for key in entries} == {(32, 16), (32, 4)}


def test_each_point_has_a_pool_of_its_size_and_the_stored_setting_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_gpu: None
) -> None:
    """The size of the pool decides between kernels; settings that are not proposed come from the nearest entry."""
    pools, tried, odd = [], [], OverlapConfig(comm_blocks=5, num_panels=1)

    def fake(problem: Problem, settings: Sequence[OverlapConfig | None], group, **named) -> tuple[Measured, ...]:
        pools.append((problem.num_tokens, group.workspace.shape.max_tokens, group.workspace.shape.hidden_size))
        tried.append(settings)
        return tuple(Measured(setting=setting, ms=1.0 if setting == odd else 2.0) for setting in settings)

    monkeypatch.setattr(tune, "measure_layer", fake)
    candidates = tune.candidates
    monkeypatch.setattr(tune, "candidates", lambda *call: [*candidates(*call), odd])
    tune.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[300]"), Rank())
    assert pools == [(300, 300, 32), (300, 300, 64)]
    monkeypatch.setattr(tune, "candidates", candidates)
    tune.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[100]"), Rank())
    assert all(settings.count(odd) == 1 for settings in tried)


MOE = MODELS["few"]
TOKENS = 40
DEADLINE_S = 0.3  # from the harm on, not before: a rank may be slow
BAD = OverlapConfig(comm_blocks=16, num_panels=1)
SETTINGS = [None, OverlapConfig(comm_blocks=8), OverlapConfig(comm_blocks=32), BAD]  # often plain comes after BAD


def leave_fault(group: ExpertGroup) -> None:
    """Leave the note of a kernel that waited too long for rank 3 (layer 1 combine, chunk 5)."""
    group.workspace.fault.copy_(torch.tensor([1, 4, 3, 5, 9, 8, 1, 0]))


def no_harm(group: ExpertGroup) -> None:
    """To the ranks that are not broken."""


def raise_timeout(group: ExpertGroup) -> None:
    """Fail as the twin does; before the path ran, this rank's epoch stays behind and the others wait in vain."""
    raise RuntimeError("rank 1 was asleep")


def break_call(number: int, harm: Callable[[ExpertGroup], None], *, after: bool) -> list[int]:
    """Do ``harm`` before or after call ``number`` of the path with ``BAD``; the list fills with its calls."""

    def harm_in_a_hurry(group: ExpertGroup) -> None:
        hurry(group.comm, DEADLINE_S)
        harm(group)

    calls: list[int] = []

    def broken(name: str, moe: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None) -> ExpertPath:
        path = make_path(name, moe, group, overlap)

        def run(*arguments: object) -> Tensor:
            calls.append(len(calls))
            if calls[-1] == number and not after:
                harm_in_a_hurry(group)
            output = path(*arguments)
            if calls[-1] == number and after:
                harm_in_a_hurry(group)
            return output

        return run if overlap == BAD else path

    measure.make_path = broken
    return calls


def measure_with_harm(
    rank: int, world_size: int, number: int, harm: str
) -> tuple[list[float | str | None], int, list[int], bool]:
    """Times or reasons; calls of ``BAD``; epoch and fault; and whether the layer still computes what plain computes."""
    do_harm = leave_fault if harm == "fault" else raise_timeout
    calls = break_call(number, do_harm if rank == world_size - 1 else no_harm, after=harm != "raise before")
    parallel = ParallelConfig(ep=world_size)
    group = make_expert_group(MOE, parallel, max_tokens=TOKENS, dtype=torch.float32, device="cpu", timeout_s=60.0)
    problem = Problem(MOE, parallel, TOKENS, torch.float32)
    found = [item.failure or item.ms for item in measure_layer(problem, SETTINGS, group, rounds=3)]
    group.comm.timeout_s = 60.0
    state = [int(group.workspace.epoch), *group.workspace.fault.tolist()]
    inputs = measure.make_inputs(problem, group, seed=7)
    outputs = [inputs.run(make_path(name, MOE, group, OverlapConfig()), 0) for name in ("twin", "plain")]
    group.workspace.check()
    group.close()
    return found, len(calls), state, bool(torch.allclose(*outputs, atol=1e-5))


HARMS = [("fault", 0), ("fault", 1), ("fault", 4), ("raise before", 0), ("raise before", 4), ("raise after", 2)]


@pytest.mark.parametrize(
    ("world_size", "harm", "number"), [(1, "fault", 1), (1, "raise before", 4), *((2, *harm) for harm in HARMS)]
)
def test_only_the_candidate_that_failed_is_out(world_size: int, harm: str, number: int) -> None:
    ranks = run_ranks(measure_with_harm, world_size, number, harm)
    found, num_calls, state, right = ranks[0]
    waited = "CommTimeoutError: rank {} waited 0.3 s for rank {}"
    reason = "RuntimeError: rank 1 was asleep"
    if harm == "fault":
        reason = waited.format(world_size - 1, 3) + " (layer 1 combine, chunk 5, epoch 9, saw 8)"
    elif harm == "raise before" and world_size == 2:
        reason = waited.format(0, 1) + " (exchange of top-k"
    assert str(found[3]).startswith(reason), "of the first rank that failed in this call"
    assert all(isinstance(found[place], float) for place in range(3)), found
    assert all(other[0] == found for other in ranks), "all ranks know alike"
    assert all(other[2] == state for other in ranks), "epochs agree again"
    assert state[1:] == [0] * 8
    assert all(other[3] for other in ranks), "the ranks have recovered"
    assert num_calls <= 1 + 3 + 3, "one to try it, then no more than the loop in which it failed"
    assert right


def test_tune_goes_on_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_gpu: None) -> None:
    monkeypatch.setattr(measure, "make_path", make_path)  # undoes what ``break_call`` sets
    calls = break_call(3, leave_fault, after=True)
    words = ["model=tiny", f"tune.profiles={tmp_path}", "tune.models=[few]", "tune.rounds=3", "tune.tokens=[16,4]"]
    config = make_job(compose(words), 1)
    facts = tune.tune_job(config, Rank())
    assert len(calls) > 4
    failed = [[item for item in point["candidates"] if item["measured_ms"] is None] for point in facts["points"]]
    assert [[item["setting"]["comm_blocks"] for item in items] for items in failed] == [[16], []]
    entries = ProfileStore.load(tmp_path / "fake_x1.json", "fake").entries
    assert {key.tokens for key in entries} == {16, 4}
