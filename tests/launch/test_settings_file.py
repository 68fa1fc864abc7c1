"""``--config``: a user's YAML file between the defaults and the overrides, and the way back from a resolved one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from comet.launch.cli import main
from comet.launch.config import compose, make_job

FILE = """
model: mixtral_8x7b
model.num_layers: 2
parallel: ep4
train: {steps: 20, lr: 1e-3, cuda_graph: off}
generate: {prompt: "a ${b} [c, ", prompts: ["${x", y], stop: 7}
sweep.layouts: [[4, 1], [2, 2]]
output_dir: here
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(FILE)
    return str(path)


def test_the_file_counts_more_than_defaults_and_less_than_overrides(file: str) -> None:
    defaults = {"output_dir": "task", "moe_path": "twin"}
    job = compose(["train.steps=70", "generate.stop=z"], file=file, defaults=defaults)
    assert (job["model"]["name"], job["model"]["num_layers"]) == ("mixtral_8x7b", 2)
    assert (job["parallel"]["ep"], job["parallel"]["tp"]) == (4, 1)
    assert (job["train"]["steps"], job["train"]["lr"], job["train"]["cuda_graph"]) == (70, 1e-3, "off")
    assert (job["output_dir"], job["moe_path"]) == ("here", "twin")
    assert job["generate"]["prompt"] == "a ${b} [c, "
    assert (job["generate"]["prompts"], job["generate"]["stop"]) == (["${x", "y"], "z")
    assert job["sweep"]["layouts"] == [[4, 1], [2, 2]]
    assert compose([], file=file)["generate"]["stop"] == "7"


def test_an_override_of_a_group_replaces_what_the_file_says_of_it(file: str) -> None:
    job = compose(["model=tiny", "parallel=ep2", "generate.prompts=[q]"], file=file)
    assert job["model"] == compose([])["model"]
    assert (job["parallel"]["ep"], job["parallel"]["tp"]) == (2, 1)
    assert job["generate"]["prompts"] == ["q"]


def test_a_resolved_configuration_is_the_same_job_again(file: str, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["train", "--dry-run", "--config", file, "train.steps=70", "overlap.num_panels=2"]) == 0
    resolved = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(resolved)
    assert main(["train", "--dry-run", "--config", str(again)]) == 0
    assert capsys.readouterr().out == resolved
    first = make_job(compose(["train.steps=70", "overlap.num_panels=2"], file=file), 4)
    assert make_job(compose([], file=str(again)), 4) == first
    assert yaml.safe_load(resolved)["output_dir"] == "here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overlap: {transport: copy}", "overlap.transport is no longer a setting: leave it out"),
        ("train: {stepz: 3}", "train.stepz is no setting; did you mean train.steps?"),
        ("train: {steps: abc}", "train.steps: Value 'abc' of type 'str' could not be converted to Integer"),
        ("train: 3", "train must hold settings, name: value, not 3"),
        ("model: foo", "model='foo' must be one of deepseek_v3, "),
        ("model: {moe: {top: 3}}", "model.moe.top is no setting; did you mean model.moe.top_k?"),
        ("a: [", " must be a YAML file: "),
        ("- 1", " must hold settings, name: value, not [1]"),
        ("generate: {prompts: a}", "generate.prompts: "),
        ("defaults: [x]", "defaults is no setting"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text: str, message: str, tmp_path, capsys) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["train", "--dry-run", f"--config={path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"comet: error: --config={path}")
    assert message in line


def test_a_missing_file_is_named(tmp_path, capsys) -> None:
    assert main(["explain", "--config", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err == f"comet: error: No such file or directory: '{tmp_path}/none.yaml'\n"
