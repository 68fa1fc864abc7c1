"""Composition of the configuration: Hydra groups and overrides in, one validated ``JobConfig`` out.

``compose`` returns a plain container (what rank 0 sends to the others), ``make_job`` makes dataclasses of it. Every
mistake of the user is a ``ValueError`` of one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, make_dataclass
from importlib.resources import files
from typing import Any, get_args, get_origin

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comet.config import OverlapConfig, ParallelConfig, check_removed, require
from comet.generation.source import find_source, model_of
from comet.jobs.config import JobConfig
from comet.launch.help import config_groups
from comet.launch.schema import SHORTENED, build, schema_of, setting_names
from comet.launch.settings_file import Settings, with_saved_settings
from comet.launch.tasks.registry import did_you_mean

CPU_RANKS = 2
# Text of any kind, taken as it is typed: Hydra would strip its spaces and read commas, brackets and quotes.
VERBATIM = ("generate.prompt", "generate.stop")


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
    """What only the command line knows.

    Args:
        nproc: Ranks to start on this machine; ``None`` starts one on every GPU, or two on a machine without.
    """

    nproc: int | None = None


def job_schema() -> type:
    """The schema of the whole command: ``JobConfig`` with open ``ep`` and ``overlap``, and ``nproc``."""
    job = schema_of(JobConfig, {ParallelConfig: OpenParallel, OverlapConfig: OpenOverlap})
    return make_dataclass("CommandSchema", [], bases=(job, CommandSettings), kw_only=True)


def compose(
    overrides: Sequence[str], *, file: str | None = None, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compose the configuration of a job: defaults, then the user's file, then the overrides.

    Args:
        overrides: Hydra overrides, for example ``["model=tiny", "parallel.ep=2"]``; what follows ``generate.prompt=``
            and ``generate.stop=`` is taken as it is.
        defaults: Settings of the task, before both.

    Returns:
        A plain container with all interpolations resolved; ``generate.source`` has decided ``model``, and what is not
        named is that of the run that ``resume`` names.
    """
    named = [word.lstrip("+").partition("=")[0] for word in overrides]
    overrides, texts = split_verbatim(overrides)
    schema = OmegaConf.structured(job_schema())
    overrides = [as_typed(text) for text in overrides]
    names = [*setting_names(OmegaConf.to_container(schema)), *config_groups()]
    parsed = [_parse(text, names) for text in overrides]
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
    return with_source_model(with_saved_settings(job, [*named, *settings.names()]), overrides)


def names_folder(overrides: Sequence[str], file: str | None) -> bool:
    """Whether the user gave ``output_dir``, and so that it is the same whenever it is composed."""
    given = [text for name, _, text in (word.partition("=") for word in overrides) if name == "output_dir"]
    in_file = Settings.read(file, OmegaConf.structured(job_schema())).values.get("output_dir", "${")
    return "${" not in (given or [in_file])[-1]


def split_verbatim(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Overrides for Hydra, and the texts that are not Hydra's to parse, by the name they have in ``generate``.

    Example: ``["model=tiny", "generate.prompt=a, b "]`` gives ``["model=tiny"]`` and ``{"prompt": "a, b "}``.
    """
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


def with_source_model(job: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The container, with the model of ``generate.source`` if one is given; raises as ``compose`` does."""
    source = job["generate"]["source"]
    if source is None:
        return job
    chosen = [word for word in overrides if word.lstrip("+").partition("=")[0].split(".")[0] == "model"]
    require(not chosen, f"generate.source={source!r} decides the model: {', '.join(chosen)} must be left out")
    return {**job, "model": asdict(model_of(find_source(source)))}


def default_ranks(container: Mapping[str, Any], num_gpus: int) -> int:
    """How many ranks this machine should start, at least 1.

    ``nproc`` if the user gave it, or one with an ``expert_budget`` and no group asked for. Otherwise every visible GPU,
    two ranks on a machine without, or ep * tp there if ``ep`` is given. With an open ``ep`` the number is lowered until
    the experts divide over the ranks.

    Example: ``ep`` open, ``tp=1``, 8 experts: 2 ranks without a GPU, 4 on 4 GPUs, 4 on 6 GPUs.
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


def _require_gpus(num_gpus: int, needed: int, what: str) -> None:
    rule = f"must be at most the {num_gpus} visible GPUs of this machine"
    require(num_gpus == 0 or needed <= num_gpus, f"{what} {rule}")


def make_job(container: Mapping[str, Any], world_size: int) -> JobConfig:
    """Make the validated configuration of a job, with ``ep`` filled in, that runs on ``world_size`` ranks in all."""
    values = {name: value for name, value in container.items() if name != "nproc"}
    ep, tp = values["parallel"]["ep"], values["parallel"]["tp"]
    require(tp >= 1, f"parallel.tp={tp} must be at least 1")
    if ep is None:
        require(world_size % tp == 0, f"world_size={world_size} must be a multiple of parallel.tp={tp}")
        ep = world_size // tp
    overlap = {name: value for name, value in values["overlap"].items() if value is not None}
    job = build(JobConfig, {**values, "parallel": {**values["parallel"], "ep": ep}, "overlap": overlap or None})
    job.parallel.check(job.model.moe)
    group = job.parallel.world_size
    require(
        world_size % group == 0,
        f"world_size={world_size} must be a multiple of parallel.ep={ep} x parallel.tp={tp} = {group}",
    )
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
    inside = next((each for each in names if each.startswith(f"{name}.") and name not in config_groups()), None)
    is_value = isinstance(override.value(), (str, int, float, list))
    require(not (inside and is_value), f"override {text!r} must name one of the settings in {name}, such as {inside}")
    items = override.value() if _kind_of(name) == list[str] else None
    changed = [item for item in items if str(item) not in text] if isinstance(items, list) else []
    require(not changed, f"override {text!r} must hold texts, but {changed} are none: put quotes around them")
    return override


def _explain(error: Exception, overrides: Sequence[Override]) -> str:
    """One line for an error of Hydra."""
    groups = config_groups()
    for override in overrides:
        name, value = override.key_or_group, override.value()
        if name in groups and isinstance(value, str) and value not in groups[name]:
            return f"{name}={value!r} must be one of {', '.join(groups[name])}"
        missing = _list_depth(name) - _depth_of(value)
        if missing > 0 and value is not None:
            typed = str(override.input_line).partition("=")[2]
            return f"{name}={typed} must be a list: write {name}={'[' * missing}{typed}{']' * missing}"
    lines = [line for part in (error, error.__cause__) if part is not None for line in str(part).splitlines()]
    inside = ("full_key:", "object_type=", "reference_type=")  # of OmegaConf, and no help
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


def _depth_of(value: Any) -> int:
    """How many lists a value is inside: 0 of 64, 1 of [] and [2, 1], 2 of [[2, 1]]."""
    if not isinstance(value, list):
        return 0
    return 1 + (_depth_of(value[0]) if value else 0)
