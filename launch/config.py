"""Composition of a task's settings by Hydra: groups, a file and overrides in, one validated dataclass out.

``compose`` returns plain settings (what rank 0 sends to the others), ``make_job`` makes the task's dataclass of them.
Every mistake of the user is a ``ValueError`` of one line.

Defaults < file (``--config my.yaml``) < overrides; what none of these names is that of the run that ``resume`` goes on
with. A file has the names of the command line, nested or with dots; a group's name may choose a file of that group.
What a run writes, or ``--dry-run`` prints, is such a file.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from glob import glob
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comet.config import check_removed, require
from comet.generation.source import find_source, model_of, nested
from comet.jobs.config import JobConfig, TrainJob
from comet.launch.schema import as_text, build, check_settings, check_shape, defaults_of, limits_at, setting_names
from comet.launch.tasks.registry import TASKS, config_groups, did_you_mean, imported
from comet.training.checkpoint_folder import names_checkpoint
from comet.training.saved_settings import NOT_KEPT, covers, escape, flat, read_settings, read_yaml

Job = TypeVar("Job", bound=JobConfig)

CPU_RANKS = 2
GROUPS = {"model": "tiny", "parallel": "auto"}  # the file that is chosen of each group unless another one is
SHORTENED = ("overlap", "sweep", "tune", "generate")  # sections that had more settings once
# Texts of any kind, taken as they are typed: Hydra would strip their spaces and read commas, brackets and quotes.
VERBATIM = ("generate.prompt", "generate.stop")
# Settings of a task, each with the setting or section that it stands in for unless it is empty.
STANDS_IN = {
    "sweep.models": "model", "sweep.tokens": "train.batch_size", "sweep.comm_blocks": "overlap.comm_blocks",
    "sweep.num_panels": "overlap.num_panels", "tune.models": "model", "tune.tokens": "train.batch_size",
    "generate.source": "model",
}  # fmt: skip
INPUTS = {
    "data.path": "an existing file or folder, or a pattern of some", "data.tokenizer": "an existing file or folder",
    "resume": "'auto', a checkpoint or a folder of checkpoints",
}  # fmt: skip
# Shells leave x=~/y as it is.
FOLDERS = ("output_dir", "resume", "data.path", "data.tokenizer", "generate.source", "tune.profiles")


def compose(
    overrides: Sequence[str], settings: type[JobConfig] = TrainJob, *, file: str | None = None
) -> dict[str, Any]:
    """Compose the settings of a task, as plain values.

    Args:
        overrides: Hydra overrides, such as ``model=tiny``; what follows ``generate.prompt=`` and ``generate.stop=`` is
            taken as it is.
        settings: The dataclass of the task.
        file: A YAML file; settings of other tasks in it are left out.
    """
    parsed = [_parse(text, settings) for text in overrides]
    named = [each.key_or_group for each in parsed]
    values, choices = read_file(file, settings)
    for group in GROUPS:
        if group in named:  # An override of a group replaces all that the file says of it.
            values.pop(group, None), choices.pop(group, None)
    typed = [*(f"{name}={choice}" for name, choice in choices.items()), *(str(each.input_line) for each in parsed)]
    job = _composed(settings, values, typed)
    if job.get("resume") is not None:
        given = [*named, *choices, *flat(values)]
        job = _composed(settings, nested({**_of_run(job, given), **flat(values)}), typed)
    check_settings(settings, job)
    for setting in STANDS_IN:
        _stand_in(job, setting, parsed)
    return job


def _composed(settings: type, values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a task's defaults, the files that groups choose, a user's file and overrides by Hydra."""
    groups = [{name: choice} for name, choice in GROUPS.items()]
    store = ConfigStore.instance()
    try:
        store.store(name="settings", node=defaults_of(settings))
        store.store(name="command", node={"defaults": ["settings", *groups, "_self_"], **values})
        with initialize_config_dir(str(files("comet.configs")), version_base="1.3", job_name="comet"):
            config = hydra_compose("command", overrides=list(overrides))
        missing = ", ".join(sorted(OmegaConf.missing_keys(config)))
        require(not missing, f"{missing} must be given")
        job: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        rule = "must be a value, or refer to another setting by its whole name, as ${train.steps}"
        raise ValueError(f"{error.full_key} {rule}: {str(error).splitlines()[0]}") from error
    except HydraException as error:
        lines = [line for part in (error, error.__cause__) if part is not None for line in str(part).splitlines()]
        inside = ("full_key:", "object_type=", "reference_type=")  # OmegaConf adds these, which help no user.
        raise ValueError(" ".join(each.strip() for each in lines if not each.strip().startswith(inside))) from error
    for name in FOLDERS:
        section, _, last = name.rpartition(".")
        tree = job.get(section, {}) if section else job
        if isinstance(tree, dict) and isinstance(tree.get(last), str):
            tree[last] = os.path.expanduser(tree[last])
    return job


def _of_run(job: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """Settings of the run that ``resume`` names, by their names, but for those that the user gave.

    ``output_dir`` becomes the folder of the run, unless it is given, or ``resume`` names a checkpoint. ``require_same``
    says which settings must not differ.
    """
    rule = "must come with the output_dir of the run, as output_dir=outputs/run: the default is a new folder every time"
    require(job["resume"] != "auto" or "output_dir" in given, f"resume='auto' {rule}")
    folder = Path(str(job["output_dir"] if job["resume"] == "auto" else job["resume"]))
    layout = ["nproc", "parallel"]  # one says nothing without the other
    keep = [*given, *NOT_KEPT, *(layout if any(covers(layout, name) for name in given) else [])]
    own, saved = flat(job), flat(read_settings(folder) or {})
    found = {name: value for name, value in saved.items() if name in own and not covers(keep, name)}
    return found if "output_dir" in given or names_checkpoint(folder) else {"output_dir": str(folder), **found}


def _stand_in(job: dict[str, Any], setting: str, overrides: Sequence[Override]) -> None:
    """Refuse overrides that a setting of ``STANDS_IN`` replaces; take the model that it names, or the first of them.

    The ranks must fit that model. The context of a model that is measured stays, because the tokens come from it.
    """
    section, _, last = setting.partition(".")
    name, value = STANDS_IN[setting], job.get(section, {}).get(last)
    if not value:
        return
    typed = {str(each.input_line): flat({each.key_or_group: each.value()}) for each in overrides}
    idle = ", ".join(text for text, settings in typed.items() if any(covers([name], each) for each in settings))
    given, way = f"{setting}={as_text(value)}", f", or {setting}=[] be given" * isinstance(value, list)
    require(not idle, f"{given} stands in for {name}: {idle} must be left out{way}")
    if setting == "generate.source":
        job[name] = asdict(model_of(find_source(value)))
    elif name == "model":
        known = config_groups()[name]
        unknown = next((each for each in value if each not in known), None)
        require(unknown is None, f"{given}: {unknown!r} must be one of {', '.join(known)}")
        job[name] = _composed(JobConfig, {}, [f"model={value[0]}"])[name] | {"context": job[name]["context"]}


def refuse_options(unknown: Sequence[str], words: Sequence[str], settings: type) -> NoReturn:
    """Raise ``ValueError`` for words that begin with a dash and are no option, naming the settings they stand for."""
    name, equals, value = unknown[0].lstrip("-").partition("=")
    name = name.replace("-", "_")
    found = [each for each in setting_names(defaults_of(settings)) if each == name or each.endswith(f".{name}")]
    following = [*words, ""][words.index(unknown[0]) + 1]
    typed = value if equals or "=" in following or following.startswith("-") else following
    ways = " or ".join(f"{each}={typed}" for each in found) or "name=value"
    raise ValueError(f"unrecognized arguments: {' '.join(unknown)}; settings have no dashes: write {ways}")


def names_folder(overrides: Sequence[str], settings: type, file: str | None) -> bool:
    """Whether the user gave ``output_dir``, and so that it is the same whenever it is composed."""
    given = [text for name, _, text in (word.partition("=") for word in overrides) if name == "output_dir"]
    return "${" not in (given or [read_file(file, settings)[0].get("output_dir", "${")])[-1]


def as_typed(text: str, settings: type = TrainJob) -> str:
    """An override whose value Hydra takes for the text it is, where the setting is a text.

    Example: ``output_dir=2026_11_26`` gives ``output_dir='2026_11_26'``, which Hydra would make 20261126, and
    ``data.path=~/x`` gives ``data.path='~/x'``, which it would refuse.
    """
    name, equals, value = text.partition("=")
    limits = limits_at(settings, name)
    if not equals or limits.depth or limits.kind is not str:
        return text
    found: Any = ...
    if name in VERBATIM:
        value = escape(value)
    else:
        with suppress(HydraException):
            found = OverridesParser.create().parse_override(text).value()
    is_taken = found is None or isinstance(found, (str, list, dict))
    return text if is_taken else f"{name}={QuotedString(value, Quote.single).with_quotes()}"


def default_ranks(container: Mapping[str, Any], num_gpus: int) -> int:
    """How many ranks this machine should start, at least 1.

    ``nproc`` if the user gave it, or one with an ``expert_budget`` and no group asked for. Otherwise every visible GPU,
    two ranks on a machine without, or ep * tp there if ``ep`` is given. With an open ``ep`` the number is lowered until
    the experts divide over the ranks: of 8 experts 2 ranks without a GPU, 4 on 4 GPUs, 4 on 6 GPUs.
    """
    requested, ep, tp = container["nproc"], container["parallel"]["ep"], container["parallel"]["tp"]
    if requested is not None:
        _require_gpus(num_gpus, requested, f"nproc={requested}")
        return int(requested)
    if container.get("generate", {}).get("expert_budget") is not None and (ep or 1) * tp == 1:
        return 1
    if ep is not None:
        group = ep * tp
        _require_gpus(num_gpus, group, f"parallel.ep={ep} x parallel.tp={tp}")
        return int(max(num_gpus // group, 1) * group)
    _require_gpus(num_gpus, tp, f"parallel.tp={tp}")
    shards = max((num_gpus or CPU_RANKS) // tp, 1)
    while container["model"]["moe"]["num_experts"] % shards:
        shards -= 1
    return int(shards * tp)


def require_inputs(container: Mapping[str, Any], dry_run: bool) -> None:
    """Raise the error that ranks would raise later for missing inputs, or an output folder that cannot be written."""
    settings = flat(container)
    for name, rule in INPUTS.items():
        path = settings.get(name)
        if path not in (None, "auto") and not (os.path.exists(path) or glob(path)):
            raise FileNotFoundError(errno.ENOENT, f"{name} must be {rule}", path)
    if dry_run:
        return
    if "generate.source" in settings:
        find_source(settings["generate.source"])
    if "output_dir" in settings and settings.get("modular.pair") != []:
        path = settings["output_dir"]
        try:  # Permissions alone do not tell, as in /proc: a folder is made and removed.
            there = next(each for each in (Path(path), *Path(path).absolute().parents) if each.exists())
            tempfile.TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            raise OSError(error.errno, f"output_dir must be a folder to write in ({error.strerror})", path) from error


def _require_gpus(num_gpus: int, needed: int, what: str) -> None:
    rule = f"must be at most the {num_gpus} visible GPUs of this machine"
    require(num_gpus == 0 or needed <= num_gpus, f"{what} {rule}")


def make_job(container: Mapping[str, Any], world_size: int, settings: type[Job] = TrainJob) -> Job:  # type: ignore[assignment]
    """Make the validated settings of a task, with ``ep`` filled in, that runs on ``world_size`` ranks in all."""
    ep, tp = container["parallel"]["ep"], container["parallel"]["tp"]
    ranks = f"{'nproc' if container['nproc'] else 'world_size'}={world_size}"
    num_experts = container["model"]["moe"]["num_experts"]
    if ep is None:
        require(world_size % tp == 0, f"{ranks} must be a multiple of parallel.tp={tp}")
        ep = world_size // tp
        rule = f"must divide model.moe.num_experts={num_experts}: give another number of ranks, or parallel.ep"
        require(num_experts % ep == 0, f"{ranks} makes parallel.ep={ep}, which {rule}")
    job = build(settings, {**container, "parallel": {**container["parallel"], "ep": ep}})
    group = job.parallel.world_size
    rule = f"must be a multiple of parallel.ep={ep} x parallel.tp={tp} = {group}"
    require(world_size % group == 0, f"{ranks} {rule}")
    return job


def _parse(text: str, settings: type) -> Override:
    """An override that gives a setting a value, or a group a choice."""
    try:
        override = OverridesParser.create().parse_override(as_typed(text, settings))
    except HydraException as error:
        raise ValueError(f"override {text!r} must have the form name=value") from error
    name, typed = override.key_or_group, text.partition("=")[2]
    require_known(name, settings, f"override {text!r}: ")
    is_plain = not (override.is_delete() or override.is_add() or override.package)
    require(is_plain, f"override {text!r} must have the form {name}=value: no setting can be added or removed")
    depth = limits_at(settings, name).depth
    rule = "one value: a job has one, so start it once for each; a list has brackets, as [1,2]"
    rule = f"a list: write {name}={'[' * depth}{typed}{']' * depth}" if depth else rule
    require(not override.is_sweep_override(), f"{text} must be {rule}")
    known, value = config_groups().get(name), override.value()
    require(not known or value in known, f"{text} must be one of {', '.join(known or [])}")
    check_shape(settings, name, value)
    return override


def require_known(name: str, settings: type, where: str) -> None:
    """Raise ``ValueError`` for what is no setting of a task; it names the task that has it, or what is close."""
    names = [*setting_names(defaults_of(settings))]
    if name in names:
        return
    if others := tasks_with(name):
        way = "; output_dir=FOLDER continues a sweep" if name == "resume" else ""
        raise ValueError(f"{where}{name} must be left out: it is a setting of comet {', '.join(others)}{way}")
    section, _, last = name.rpartition(".")
    check_removed([last] if section in SHORTENED else [], f"{where}{section}.")
    raise ValueError(f"{where}{name} is no setting{did_you_mean(name, [*names, *config_groups()])}")


def tasks_with(name: str) -> list[str]:
    """Names of the tasks that have a setting or section."""
    found = {task: imported(each.settings) for task, each in TASKS.items() if each.settings}
    return [task for task, settings in found.items() if name in setting_names(defaults_of(settings))]


def read_file(path: str | None, settings: type) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of a task in a file, nested, and the files of groups that it chooses; nothing of ``None``."""
    if path is None:
        return {}, {}
    content = read_yaml(Path(path), f"--config={path}")
    choices = {name: content.pop(name) for name in GROUPS if isinstance(content.get(name), str)}
    for name, choice in choices.items():
        known = config_groups()[name]
        require(choice in known, f"--config={path}: {name}={choice!r} must be one of {', '.join(known)}")
    found, names = flat(content), [*setting_names(content)]
    twice = next((name for name in found if names.count(name) > 1), "")
    require(not twice, f"--config={path}: {twice} is given twice, with dots and in its section: keep one of them")
    own = [*setting_names(defaults_of(settings))]
    for name, value in found.items():
        if name not in own and not tasks_with(name):
            require_known(name, settings, f"--config={path}: ")
        check_shape(settings, name, value)
    return nested({name: value for name, value in found.items() if name in own}), choices
