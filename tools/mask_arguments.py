"""The part of a command line that says which masks to take: files first, or the arguments of the generator."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tools.mask_files import SUFFIXES, MaskSource, file_sources, generated_sources

_FILES_FIRST = "masks first: put files and run folders before all options"
_GENERATED = {"geometries": ["wan720"], "densities": [0.414], "seeds": [0], "layers": [0]}


def whole_number(least: int) -> Callable[[str], int]:
    """Returns an argparse type for integers of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be whole numbers, got {text!r}; {_FILES_FIRST}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}; raise it")
        return value

    return parse


def number(text: str) -> float:
    """An argparse type for floats."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers, got {text!r}; {_FILES_FIRST}") from None


def add_mask_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the files and what the generator takes."""
    parser.add_argument(
        "masks", type=Path, nargs="*", help=f"{', '.join(SUFFIXES)} files, or run folders; masks first, then options"
    )
    made = parser.add_argument_group("generated masks", "all combinations, see tools/structured_masks.py --help")
    made.add_argument("--kinds", nargs="+", default=[], help="structures of masks; none are made without")
    made.add_argument("--geometries", nargs="+", help="default: wan720")
    made.add_argument("--densities", type=number, nargs="+", help="shares of dense blocks (default: 0.414)")
    made.add_argument("--seeds", type=whole_number(0), nargs="+", help="default: 0")
    made.add_argument("--layers", type=whole_number(0), nargs="+", help="default: 0")


def mask_sources(given: argparse.Namespace) -> list[MaskSource]:
    """The masks of a command line: those of files, then those of the generator.

    Raises:
        ValueError: if a file is read as a value of an option, an option of the generator stands without `--kinds`, or
            a mask cannot be had.
    """
    for option, values in vars(given).items():
        for value in values if isinstance(values, list) and option != "masks" else ():
            if isinstance(value, str) and (value.endswith(SUFFIXES) or Path(value).is_dir()):
                raise ValueError(f"{_flag(option)} took {value!r} as a value; {_FILES_FIRST}")
    useless = [_flag(option) for option in _GENERATED if getattr(given, option) is not None]
    if useless and not given.kinds:
        raise ValueError(
            f"{', '.join(useless)} say what to generate and need --kinds, files are taken whole; add --kinds or leave "
            "them out"
        )
    chosen = {
        option: usual if getattr(given, option) is None else getattr(given, option)
        for option, usual in _GENERATED.items()
    }
    sources = [source for path in given.masks for source in file_sources(path)]
    return sources + generated_sources(given.kinds, **chosen)  # type: ignore[arg-type]


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
