"""Command line: one YAML file, dotted flags and a few short names become one frozen configuration."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import jsonargparse
import yaml

from dbsp_megatron.config.generate import GenerateConfig, PipelineConfig
from dbsp_megatron.config.schema import InferConfig, TrainConfig
from dbsp_megatron.masks.config import COMMON, MaskConfig

ConfigT = TypeVar("ConfigT", TrainConfig, InferConfig, PipelineConfig)

_SP_ALIASES = {
    "--sp-strategy": "--sp.strategy",
    "--ulysses-degree": "--sp.ulysses_degree",
    "--ring-degree": "--sp.ring_degree",
    "--sp-verify": "--sp.verify_steps",
    "--sp-calibration": "--sp.calibration",
    "--sp-mask": "--mask.method",
    "--mask": "--mask.method",
}
TRAIN_ALIASES = {
    **_SP_ALIASES,
    "--data": "--data.paths",
    "--steps": "--train.steps",
    "--name": "--run.name",
    "--init-from": "--run.init_from",
    "--engine": "--train.engine",
    "--profile": "--run.profile",
    "--tensor-parallel-size": "--parallel.tensor_parallel_size",
    "--pipeline-parallel-size": "--parallel.pipeline_parallel_size",
    "--virtual-pipeline-parallel-size": "--parallel.virtual_pipeline_parallel_size",
    "--wandb": "--wandb.mode",
    "--skip-bad-data": "--data.skip_bad_data",
}
INFER_ALIASES = {
    **_SP_ALIASES,
    "--steps": "--sample.steps",
    "--seed": "--sample.seed",
    "--reuse-report": "--sample.reuse_report",
}
PIPELINE_ALIASES = {
    **_SP_ALIASES,
    "--num-inference-steps": "--generate.steps",
    **{f"--{f.name.replace('_', '-')}": f"--generate.{f.name}" for f in fields(GenerateConfig)},
}
_LISTS = ("--data.paths",)
_SWITCHES = (
    "--data.skip_bad_data",
    "--sample.reuse_report",
    *(f"--generate.{f.name}" for f in fields(GenerateConfig) if f.type == "bool"),
)


@dataclass(frozen=True, kw_only=True)
class Command(Generic[ConfigT]):
    """A parsed command line."""

    config: ConfigT
    dry_run: bool
    world_size: int | None
    """Processes to assume in a dry run; None takes the launcher's."""


class _Parser(jsonargparse.ArgumentParser):
    """Raises ValueError instead of printing the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ValueError(message) from ex


def parse_train(argv: Sequence[str]) -> Command[TrainConfig]:
    """Parse the arguments of `dbsp-train`.

    Raises:
        ValueError: an unknown key, a wrong type or a value that breaks a rule.
    """
    description = "Train a video Diffusion Transformer with balanced sparse attention."
    return _parse("dbsp-train", description, TrainConfig, TRAIN_ALIASES, argv)


def parse_infer(argv: Sequence[str], defaults: Mapping[str, Any] | None = None) -> Command[InferConfig]:
    """Parse the arguments of `dbsp-infer`.

    Args:
        argv: words after the command.
        defaults: values by dotted key that take the place of those in the schema: settings of the trained run.

    Raises:
        ValueError: an unknown key, a wrong type or a value that breaks a rule.
    """
    description = "Sample videos from a trained run. For pipelines of diffusers: dbsp-infer --pipeline FOLDER --help"
    return _parse("dbsp-infer", description, InferConfig, INFER_ALIASES, argv, defaults)


def parse_pipeline(argv: Sequence[str]) -> Command[PipelineConfig]:
    """Parse the arguments of `dbsp-infer --pipeline`.

    Raises:
        ValueError: an unknown key, a wrong type or a value that breaks a rule.
    """
    description = "Run a pipeline of diffusers under sequence parallelism."
    return _parse("dbsp-infer --pipeline FOLDER", description, PipelineConfig, PIPELINE_ALIASES, argv)


def names_pipeline(argv: Sequence[str]) -> bool:
    """Whether arguments of `dbsp-infer` name a pipeline, by flag or in the YAML file.

    Raises:
        ValueError: they name a checkpoint as well.
    """
    given = {key for key in ("pipeline", "checkpoint") if any(w.partition("=")[0] == f"--{key}" for w in argv)}
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--config":
            given |= _keys_of(value if equals else after)
    if given >= {"pipeline", "checkpoint"}:
        raise ValueError(
            "pipeline and checkpoint exclude one another, got both: a pipeline of diffusers or a trained run, name one"
        )
    return "pipeline" in given


def _keys_of(path: str) -> set[str]:
    """Top-level keys of a YAML file that have a value; none if it cannot be read, which the parser will tell."""
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return set()
    return {str(key) for key, value in loaded.items() if value} if isinstance(loaded, dict) else set()


def expand_aliases(argv: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Replace short names by dotted keys, hyphens in keys by underscores, and several values of a list key by one.

    `--data a b` becomes `--data.paths=["a", "b"]`, `--skip-bad-data` becomes `--data.skip_bad_data=true`.
    """
    expanded: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            expanded.append(word)
            continue
        name, equals, value = word.partition("=")
        key = aliases.get(name) or aliases.get(name.replace("_", "-"), "--" + name[2:].replace("-", "_"))
        if key in _LISTS and name in aliases:
            values = [value] if equals else []
            while words and not words[0].startswith("--"):
                values.append(words.pop(0))
            if not values:
                raise ValueError(f"{name} needs at least one path")
            expanded.append(f"{key}={_yaml_list(values)}")
        elif key in _SWITCHES and not equals and not (words and words[0].lower() in ("true", "false")):
            expanded.append(f"{key}=true")
        else:
            expanded.append(key + equals + value)
    return expanded


def without_section(argv: Sequence[str], section: str) -> list[str]:
    """Arguments of `dbsp-infer` without the flags of one section, and with their short names replaced."""
    return _without_section(expand_aliases(argv, INFER_ALIASES), section)


def _without_section(words: Sequence[str], section: str) -> list[str]:
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.startswith(f"--{section}.")
        if not dropping:
            kept.append(word)
    return kept


def _parse(
    program: str,
    description: str,
    kind: type[ConfigT],
    aliases: Mapping[str, str],
    argv: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
) -> Command[ConfigT]:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(
        prog=program,
        usage=f"{program} [--config YAML] [--dry-run] [--KEY VALUE ...]",
        description=description,
        epilog=_epilog(aliases),
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below; flags win over it.")
    parser.add_class_arguments(kind, as_group=False)
    if defaults:
        parser.set_defaults(dict(defaults))
    # Not keys of the configuration: they are taken out first, so that --print-config shows a file that can be used.
    dry_run, world_size, rest = _take_dry_run(argv)
    words = _files_first(expand_aliases(rest, aliases))
    try:
        values = parser.instantiate(_with_own_settings(parser, words)).as_dict()
    except TypeError as error:
        # A section that is no mapping, such as `train: 3`.
        raise ValueError(f"a section of the configuration is not a mapping of keys ({error})") from error
    values.pop("config")
    return Command(config=kind(**values), dry_run=dry_run, world_size=world_size)


def _files_first(words: Sequence[str]) -> list[str]:
    """The words with `--config FILE` in front: the parser lets what comes later win, and flags are to win anywhere."""
    files: list[str] = []
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--config" and left:
            files += [word, left.pop(0)]
        else:
            (files if word.startswith("--config=") else others).append(word)
    return files + others


def _with_own_settings(parser: _Parser, words: list[str]) -> jsonargparse.Namespace:
    """Parsed words, in which a mask method named by a flag has its own settings, not those of the file's method."""
    parsed = parser.parse_args(words)
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    if "--mask.method" not in flags or "mask.method" not in parsed:
        return parsed
    others = parser.parse_args(_without_section(words, "mask"))
    if others["mask.method"] != parsed["mask.method"]:
        for key in (f"mask.{f.name}" for f in fields(MaskConfig) if f.name not in COMMON):
            if f"--{key}" not in flags:
                parsed[key] = None
    return parsed


def _take_dry_run(argv: Sequence[str]) -> tuple[bool, int | None, list[str]]:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    # Also as `expand_aliases` leaves them.
    first.add_argument("--dry-run", "--dry_run", action="store_true")
    first.add_argument("--world-size", "--world_size", type=int)
    try:
        found, rest = first.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if found.world_size is not None and found.world_size < 1:
        raise ValueError(f"--world-size must be >= 1, got {found.world_size}")
    return found.dry_run, found.world_size, rest


def _epilog(aliases: Mapping[str, str]) -> str:
    short = ", ".join(f"{name} = {key}" for name, key in aliases.items())
    return (
        f"Short names: {short}. --dry-run checks everything, prints what would run on --world-size N processes "
        "(default: the launcher's) and stops."
    )


def _yaml_list(values: Sequence[str]) -> str:
    quoted = ['"' + re.sub(r'(["\\])', r"\\\1", value) + '"' for value in values]
    return "[" + ", ".join(quoted) + "]"
