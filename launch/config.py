"""Composition of the configuration: Hydra groups, files and overrides in, one validated ``JobConfig`` out.

``compose`` returns a plain container (what rank 0 sends to the others), ``make_job`` makes dataclasses of it. Every
mistake of the user is a ``ValueError`` of one line.

Defaults < file (``--config my.yaml``) < overrides; what none of these names is that of the run that ``resume`` goes on
with. A file has the names of the command line, nested or with dots; a group's name may choose a file of that group.
What a run writes, or ``--dry-run`` prints, is such a file.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from comet.config import OverlapConfig, ParallelConfig, check_removed, require
from comet.generation.source import find_source, model_of, nested
from comet.jobs.config import JobConfig
from comet.launch.schema import SHORTENED, build, schema_of, setting_names
from comet.launch.tasks.registry import config_groups, did_you_mean
from comet.training.checkpoint_folder import names_checkpoint
from comet.training.saved_settings import NOT_KEPT, UniqueLoader, covers, flat, read_settings

CPU_RANKS = 2
# Text of any kind, taken as it is typed: Hydra would strip its spaces and read commas, brackets and quotes.
VERBATIM = ("generate.prompt", "generate.stop")
# Lists of a task, each with the setting or section that it stands in for unless it is empty.
STANDS_IN = {
    "sweep.models": "model", "sweep.tokens": "train.batch_size", "sweep.comm_blocks": "overlap.comm_blocks",
    "sweep.num_panels": "overlap.num_panels", "tune.models": "model", "tune.tokens": "train.batch_size",
}  # fmt: skip
INPUTS = {"data.path": "an existing file or folder", "resume": "'auto', a checkpoint or a folder of checkpoints"}
# Settings that would change the model, the number of ranks or unnamed settings of a task that does not read them.
IDLE = ("generate", "resume")


@dataclass
class OpenParallel:
    """``parallel`` as the user writes it: ``ep`` may be left open."""

    ep: int | None = None
    tp: int = 1
    node_size: int | None = None


@dataclass
class OpenOverlap:
    """``overlap`` as the user writes it: open, a layer takes what was measured; what is given wins."""

    comm_blocks: int | None = None
    num_panels: int | None = None


@dataclass(kw_only=True)
class CommandSettings:
    """Settings of the command line alone.

    Args:
        nproc: Ranks to start on this machine; ``None`` starts one on every GPU, or two on a machine without.
    """

    nproc: int | None = None


@functools.cache
def job_schema() -> type:
    """The schema of the whole command: ``JobConfig`` with open ``ep`` and ``overlap``, and ``nproc``."""
    job = schema_of(JobConfig, {ParallelConfig: OpenParallel, OverlapConfig: OpenOverlap})
    return make_dataclass("CommandSchema", [], bases=(job, CommandSettings), kw_only=True)


def compose(
    overrides: Sequence[str],
    *,
    file: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    reads: Sequence[str] = (),
) -> dict[str, Any]:
    """Compose the configuration of a job: defaults, then the user's file, then the overrides, as a plain container.

    Args:
        overrides: Hydra overrides, such as ``model=tiny``; what follows ``generate.prompt=`` and ``generate.stop=`` is
            taken as it is.
        defaults: Settings of the task, before both.
        reads: Settings and sections that the task reads. None: all of them. Others are refused as overrides, for they
            would do nothing; of those in a file, ``IDLE`` are as if left out.
    """
    named = [word.lstrip("+").partition("=")[0] for word in overrides]
    overrides, texts = split_verbatim(overrides)
    schema = OmegaConf.structured(job_schema())
    overrides = [as_typed(text) for text in overrides]
    blank: Any = OmegaConf.to_container(schema)
    names = [*setting_names(blank), *config_groups()]
    parsed = [_parse(text, names) for text in overrides]
    unread = [name for name in named if reads and not covers(reads, name)]
    require(not unread, f"{', '.join(unread)} must be left out: the task reads no settings but {', '.join(reads)}")
    settings = Settings.read(file, schema).without(named)
    primary = {"defaults": ["config", "_self_"], **(defaults or {}), **settings.values}
    ConfigStore.instance().store(name="command_schema", node=schema)
    ConfigStore.instance().store(name="command", node=primary)
    try:
        with initialize_config_dir(str(files("comet.configs")), version_base="1.3", job_name="comet"):
            config = hydra_compose("command", overrides=[*settings.choices, *overrides])
            missing = ", ".join(sorted(OmegaConf.missing_keys(config)))
            require(not missing, f"{missing} must be given")
        container = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error, parsed)) from error
    assert isinstance(container, dict), "the root of the configuration is a mapping"
    job = {str(key): value for key, value in container.items()}
    job["generate"] |= settings.texts | texts
    idle = {name: blank[name] for name in IDLE if reads and not covers(reads, name)}
    job |= idle
    for section, name in [(job, "output_dir"), (job, "resume"), (job["data"], "path"), (job["generate"], "source"),
                          (job["tune"], "profiles")]:  # fmt: skip
        section[name] = section[name] and os.path.expanduser(section[name])  # shells leave data.path=~/x as it is
    given = [*named, *settings.names()]
    is_lost = job["resume"] == "auto" and "output_dir" not in given
    rule = "must come with the output_dir of the run, as output_dir=outputs/run: the default is a new folder every time"
    require(not is_lost, f"resume='auto' {rule}")
    job = with_saved_settings(job, [*given, *idle])
    for setting in (each for each in STANDS_IN if covers(reads, each)):
        _stand_in(job, setting, parsed)
    if (source := job["generate"]["source"]) is not None:
        chosen = _typed("model", parsed)
        require(not chosen, f"generate.source={source!r} decides the model: {', '.join(chosen)} must be left out")
        job["model"] = asdict(model_of(find_source(source)))
    return job


def _stand_in(job: dict[str, Any], setting: str, overrides: Sequence[Override]) -> None:
    """Refuse settings that a list of ``STANDS_IN`` replaces; the first of its models becomes the job's.

    The ranks must fit one that is measured; the context stays, because the tokens of a step come from it.
    """
    section, _, last = setting.partition(".")
    name, values = STANDS_IN[setting], job[section][last]
    if not values:
        return
    idle, given = ", ".join(_typed(name, overrides)), f"{setting}=[{','.join(map(str, values))}]"
    require(not idle, f"{given} stands in for {name}: {idle} must be left out, or {setting}=[] be given")
    if name == "model":
        unknown, known = [each for each in values if each not in config_groups()[name]], config_groups()[name]
        require(not unknown, f"{given}: {[*unknown, ''][0]!r} must be one of {', '.join(known)}")
        job[name] = compose([f"model={values[0]}"])[name] | {"context": job[name]["context"]}


def _typed(name: str, overrides: Iterable[Override]) -> list[str]:
    """The overrides of a setting, or of what is in a section of that name."""
    found = {str(each.input_line): flat({each.key_or_group: each.value()}) for each in overrides}
    return [text for text, settings in found.items() if any(covers([name], setting) for setting in settings)]


def refuse_options(unknown: Sequence[str], words: Sequence[str], reads: Sequence[str]) -> NoReturn:
    """Raise ``ValueError`` for words that begin with a dash and are no option, naming the settings they stand for."""
    name, equals, value = unknown[0].lstrip("-").partition("=")
    name = name.replace("-", "_")
    known = setting_names(OmegaConf.to_container(OmegaConf.structured(job_schema())))
    names = (each for each in known if not reads or covers(reads, each))
    found = [each for each in names if each == name or each.endswith(f".{name}")]
    following = [*words, ""][words.index(unknown[0]) + 1]
    typed = value if equals or "=" in following or following.startswith("-") else following
    ways = " or ".join(f"{each}={typed}" for each in found) or "name=value"
    raise ValueError(f"unrecognized arguments: {' '.join(unknown)}; settings have no dashes: write {ways}")


def names_folder(overrides: Sequence[str], file: str | None) -> bool:
    """Whether the user gave ``output_dir``, and so that it is the same whenever it is composed."""
    given = [text for name, _, text in (word.partition("=") for word in overrides) if name == "output_dir"]
    in_file = Settings.read(file, OmegaConf.structured(job_schema())).values.get("output_dir", "${")
    return "${" not in (given or [in_file])[-1]


def split_verbatim(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split ``["model=tiny", "generate.prompt=a, b "]`` into ``["model=tiny"]`` and ``{"prompt": "a, b "}``."""
    parts = [word.partition("=") for word in overrides]
    texts = {name.split(".")[1]: text for name, equals, text in parts if equals and name in VERBATIM}
    return ["".join(part) for part in parts if not (part[1] and part[0] in VERBATIM)], texts


def as_typed(text: str) -> str:
    """An override whose value Hydra takes for the text it is, where the setting is a text.

    Example: ``output_dir=2026_11_26`` gives ``output_dir='2026_11_26'``, which Hydra would make 20261126, and
    ``data.path=~/x`` gives ``data.path='~/x'``, which it would refuse.
    """
    name, equals, value = text.partition("=")
    if not equals or _kind_of(name) not in (str, str | None):
        return text
    try:
        found = OverridesParser.create().parse_override(text).value()
    except HydraException:
        found = ...
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
        require(requested >= 1, f"nproc={requested} must be at least 1")
        _require_gpus(num_gpus, requested, f"nproc={requested}")
        return int(requested)
    require(tp >= 1, f"parallel.tp={tp} must be at least 1")
    if container["generate"]["expert_budget"] is not None and (ep or 1) * tp == 1:
        return 1
    if ep is not None:
        require(ep >= 1, f"parallel.ep={ep} must be at least 1")
        group = ep * tp
        _require_gpus(num_gpus, group, f"parallel.ep={ep} x parallel.tp={tp}")
        return int(max(num_gpus // group, 1) * group)
    _require_gpus(num_gpus, tp, f"parallel.tp={tp}")
    shards = max((num_gpus or CPU_RANKS) // tp, 1)
    while container["model"]["moe"]["num_experts"] % shards:
        shards -= 1
    return int(shards * tp)


def require_inputs(container: Mapping[str, Any], reads: Sequence[str], dry_run: bool) -> None:
    """Raise the error that ranks would raise later for missing inputs, or an output folder that cannot be written."""
    settings = {name: value for name, value in flat(container).items() if covers(reads, name)}
    for name, rule in INPUTS.items():
        path = settings.get(name)
        if path not in (None, "auto") and not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, f"{name} must be {rule}", path)
    if "generate.source" in settings and not dry_run:
        find_source(settings["generate.source"])
    if "output_dir" in settings and settings.get("modular.pair") != [] and not dry_run:
        path = settings["output_dir"]
        try:  # Permissions alone do not tell, as in /proc: a folder is made and removed.
            there = next(each for each in (Path(path), *Path(path).absolute().parents) if each.exists())
            tempfile.TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            raise OSError(error.errno, f"output_dir must be a folder to write in ({error.strerror})", path) from error


def _require_gpus(num_gpus: int, needed: int, what: str) -> None:
    rule = f"must be at most the {num_gpus} visible GPUs of this machine"
    require(num_gpus == 0 or needed <= num_gpus, f"{what} {rule}")


def make_job(container: Mapping[str, Any], world_size: int) -> JobConfig:
    """Make the validated configuration of a job, with ``ep`` filled in, that runs on ``world_size`` ranks in all."""
    values = {name: value for name, value in container.items() if name != "nproc"}
    ep, tp = values["parallel"]["ep"], values["parallel"]["tp"]
    require(tp >= 1, f"parallel.tp={tp} must be at least 1")
    ranks = f"{'nproc' if container['nproc'] else 'world_size'}={world_size}"
    num_experts = values["model"]["moe"]["num_experts"]
    if ep is None:
        require(world_size % tp == 0, f"{ranks} must be a multiple of parallel.tp={tp}")
        ep = world_size // tp
        rule = f"must divide model.moe.num_experts={num_experts}: give another number of ranks, or parallel.ep"
        require(num_experts % ep == 0, f"{ranks} makes parallel.ep={ep}, which {rule}")
    overlap = {name: value for name, value in values["overlap"].items() if value is not None}
    job = build(JobConfig, {**values, "parallel": {**values["parallel"], "ep": ep}, "overlap": overlap or None})
    group = job.parallel.world_size
    rule = f"must be a multiple of parallel.ep={ep} x parallel.tp={tp} = {group}"
    require(world_size % group == 0, f"{ranks} {rule}")
    return job


def _parse(text: str, names: Sequence[str]) -> Override:
    """An override that gives a setting a value, or a group a choice."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ValueError(f"override {text!r} must have the form name=value") from error
    name = override.key_or_group
    section, _, last = name.rpartition(".")
    if name not in names:
        if section in SHORTENED:
            check_removed([last], f"override {text!r}: {section}.")
        hint = did_you_mean(name, names)
        raise ValueError(f"override {text!r}: {name!r} is no setting and no group of the configuration{hint}")
    is_plain = not (override.is_delete() or override.is_add() or override.package)
    require(is_plain, f"override {text!r} must have the form {name}=value: no setting can be added or removed")
    rule = "must be one value: a job has one, so start it once for each; a list has brackets, as [1,2]"
    require(not override.is_sweep_override() or _list_depth(name) > 0, f"{text} {rule}")
    choices, typed = config_groups().get(name), override.value()
    typed = repr(typed) if isinstance(typed, str) else text.partition("=")[2]
    require(not choices or override.value() in choices, f"{name}={typed} must be one of {', '.join(choices or [])}")
    inside = next((each for each in names if each.startswith(f"{name}.") and name not in config_groups()), None)
    is_value = isinstance(override.value(), (str, int, float, list))
    require(not (inside and is_value), f"override {text!r} must name one of the settings in {name}, such as {inside}")
    items = override.value() if _kind_of(name) == list[str] else None
    changed = [item for item in items if str(item) not in text] if isinstance(items, list) else []
    require(not changed, f"override {text!r} must hold texts, but {changed} are none: put quotes around them")
    return override


def _explain(error: Exception, overrides: Sequence[Override]) -> str:
    """One line for an error of Hydra."""
    for override in overrides:
        name, value = override.key_or_group, override.value()
        missing, inside = _list_depth(name), value
        while isinstance(inside, list):
            missing, inside = missing - 1, inside[0] if inside else None
        if missing > 0 and value is not None:
            typed = str(override.input_line).partition("=")[2]
            return f"{name}={typed} must be a list: write {name}={'[' * missing}{typed}{']' * missing}"
    if isinstance(error, InterpolationResolutionError):
        rule = "must be a value, or refer to another setting by its whole name, as ${train.steps}"
        return f"{error.full_key} {rule}: {str(error).splitlines()[0]}"
    lines = [line for part in (error, error.__cause__) if part is not None for line in str(part).splitlines()]
    if found := re.match(r"Error merging override (\S+)\s+field \S+ is not Optional", " ".join(lines)):
        return f"{found[1]} must have a value: this setting cannot be null"
    inside = ("full_key:", "object_type=", "reference_type=")  # OmegaConf adds these, which help no user.
    return " ".join(line.strip() for line in lines if not line.strip().startswith(inside))


def _kind_of(name: str) -> Any:
    """The type of a setting in the schema; ``None`` of what is no setting."""
    kind: Any = job_schema()
    for part in name.split("."):
        kind = {item.name: item.type for item in fields(kind)}.get(part) if is_dataclass(kind) else None
    return kind


def _list_depth(name: str) -> int:
    """How many lists a setting is: 0 of ``train.steps``, 1 of ``tune.tokens``, 2 of ``sweep.layouts``."""
    kind, depth = _kind_of(name), 0
    while get_origin(kind) is list:
        kind, depth = get_args(kind)[0], depth + 1
    return depth


def with_saved_settings(job: Mapping[str, Any], named: Iterable[str]) -> dict[str, Any]:
    """The container with the settings of the run that ``resume`` names, but for those that the user ``named``.

    ``output_dir`` becomes the folder of the run, unless it is named, or ``resume`` names a checkpoint. ``require_same``
    says which settings must not differ.
    """
    if job["resume"] is None:
        return dict(job)
    folder, named = Path(job["output_dir"] if job["resume"] == "auto" else job["resume"]), list(named)
    layout = ["nproc", "parallel"]  # one says nothing without the other
    keep = [*named, *NOT_KEPT, *(layout if any(covers(layout, name) for name in named) else [])]
    found = _filled(job, read_settings(folder) or {}, keep)
    if "output_dir" not in named and not names_checkpoint(folder):
        found["output_dir"] = str(folder)
    return found


def _filled(
    tree: Mapping[str, Any], saved: Mapping[str, Any], named: Iterable[str], prefix: str = ""
) -> dict[str, Any]:
    found = dict(tree)
    for name, value in tree.items():
        if name not in saved or covers(named, prefix + name):
            continue
        is_section = isinstance(value, dict) and isinstance(saved[name], dict)
        found[name] = _filled(value, saved[name], named, f"{prefix}{name}.") if is_section else saved[name]
    return found


TEXTS = ("prompt", "prompts", "stop")  # settings of ``generate`` that hold any text: no ${name} is looked up
INT_TAG = "tag:yaml.org,2002:int"
KINDS = {INT_TAG, *(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "timestamp"))}


class Loader(UniqueLoader):
    """YAML whose scalars stay as they are written, but for null: the schema says what is a number or a truth value.

    So ``output_dir: 2026_11_26`` is no number, and ``cuda_graph: off`` a word, as they are in an override. Integers
    that are written as Python does are some: no schema makes them of what is in a list of lists.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - so PyYAML keeps them
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in KINDS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


Loader.add_implicit_resolver(INT_TAG, re.compile("(0|-?[1-9][0-9]*)$"), list("-0123456789"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The content of a settings file."""

    values: dict[str, Any] = field(default_factory=dict)  # settings, nested
    choices: list[str] = field(default_factory=list)  # overrides that choose files of groups, such as model=tiny
    texts: dict[str, Any] = field(default_factory=dict)  # what generate is given word by word

    @classmethod
    def read(cls, path: str | None, schema: DictConfig) -> Settings:
        """Read a file; ``None`` holds nothing."""
        if path is None:
            return cls()
        try:
            content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader) or {}
        except OSError as error:
            raise ValueError(f"--config={path} must be a file that can be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"--config={path} must be a YAML file: {error}") from error
        require(isinstance(content, dict), f"--config={path} must hold settings, name: value, not {content!r:.40}")
        chosen = {name: content.pop(name) for name in config_groups() if isinstance(content.get(name), str)}
        for name, choice in chosen.items():
            known = config_groups()[name]
            require(choice in known, f"--config={path}: {name}={choice!r} must be one of {', '.join(known)}")
        names = list(setting_names(content, sections=False))
        twice = next((name for name in names if names.count(name) > 1), "")
        require(not twice, f"--config={path}: {twice} is given twice, with dots and in its section: keep one of them")
        values = nested(content)
        for name, value in values.items():
            whole = isinstance(value, dict) or not OmegaConf.is_dict(schema.get(name))
            require(whole, f"--config={path}: {name} must hold settings, name: value, not {value!r:.40}")
        generate = values.get("generate", {})
        texts = {name: _text(generate.pop(name)) for name in TEXTS if generate.get(name) is not None}
        blank = {name: [""] * len(text) if isinstance(text, list) else "" for name, text in texts.items()}
        try:
            OmegaConf.merge(schema, values, {"generate": blank})
        except ConfigKeyError as error:
            section, _, name = str(error.full_key).rpartition(".")
            check_removed([name] if section in SHORTENED else [], f"--config={path}: {section}.")
            hint = did_you_mean(str(error.full_key), setting_names(OmegaConf.to_container(schema)))
            raise ValueError(f"--config={path}: {error.full_key} is no setting{hint}") from error
        except OmegaConfBaseException as error:
            raise ValueError(f"--config={path}: {error.full_key}: {str(error).splitlines()[0]}") from error
        return cls(values=values, choices=[f"{name}={choice}" for name, choice in chosen.items()], texts=texts)

    def names(self) -> list[str]:
        """Names of the settings in the file, and of the groups that it chooses from."""
        choices = (choice.partition("=")[0] for choice in self.choices)
        return [*setting_names(self.values, sections=False), *choices, *(f"generate.{name}" for name in self.texts)]

    def without(self, names: Sequence[str]) -> Settings:
        """Settings that overrides of these names leave: a group's choice replaces all that the file says of it."""
        chosen = [name for name in names if name in config_groups()]
        return Settings(
            values={name: value for name, value in self.values.items() if name not in chosen},
            choices=[choice for choice in self.choices if choice.partition("=")[0] not in chosen],
            texts={name: text for name, text in self.texts.items() if f"generate.{name}" not in names},
        )


def _text(value: Any) -> Any:
    """A text, or a list of them; YAML reads ``prompt: 3`` as a number."""
    return [str(item) for item in value] if isinstance(value, list) else str(value)
