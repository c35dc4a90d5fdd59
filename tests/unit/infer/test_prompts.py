"""Prompt files: texts, JSON lines, names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dbsp_megatron.config.generate import GenerateConfig
from dbsp_megatron.infer.prompts import PromptJob, read_jobs, with_seeds


def _read(folder: Path, text: str, **settings: object) -> list[PromptJob]:
    (folder / "prompts.txt").write_text(text, encoding="utf-8")
    return read_jobs(GenerateConfig(prompts=str(folder / "prompts.txt"), **settings))  # type: ignore[arg-type]


def test_read_jobs_mixes_texts_and_json_lines(tmp_path: Path) -> None:
    from PIL import Image

    picture = tmp_path / "a.png"
    Image.new("RGB", (2, 2)).save(picture)
    full = {"prompt": "Ein Hund läuft", "negative_prompt": "x", "seed": 5, "image": str(picture), "name": "hund"}
    jobs = _read(tmp_path, f"\ufeffa cat\n\n  # snow, {{red}} \n{json.dumps(full)}\n", seed=3, negative_prompt="blurry")
    assert [(job.prompt, job.negative_prompt, job.seed, job.image) for job in jobs] == [
        ("a cat", "blurry", 3, ""),
        ("# snow, {red}", "blurry", 3, ""),
        ("Ein Hund läuft", "x", 5, str(picture)),
    ]
    assert jobs[0].name.startswith("a-cat-")
    assert jobs[2].name == "hund"


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """Other characters that Python calls ends of lines are part of a text, also within JSON."""
    odd = "a cat \u2028 a\x85dog\x0b\x0c\x1c snow"
    (tmp_path / "prompts.txt").write_bytes(
        f"{odd}\r\n{json.dumps({'prompt': odd, 'seed': 1}, ensure_ascii=False)}".encode()
    )
    jobs = read_jobs(GenerateConfig(prompts=str(tmp_path / "prompts.txt")))
    assert [job.prompt for job in jobs] == [odd, odd]


def test_names_depend_on_the_prompt_alone(tmp_path: Path) -> None:
    """A line that is added in front must not make everything anew."""
    first, second = _read(tmp_path, "a cat\na dog\n")
    assert [job.name for job in _read(tmp_path, "snow\na cat\na dog\n")[1:]] == [first.name, second.name]
    others = [_read(tmp_path, "a cat\n", seed=1), _read(tmp_path, "a cat\n", negative_prompt="x")]
    assert len({first.name, second.name, *(jobs[0].name for jobs in others)}) == 4
    assert read_jobs(GenerateConfig(prompt="a cat"))[0] == first
    (odd,) = _read(tmp_path, "../../etc: 雪 " + "long " * 90)
    assert "/" not in odd.name
    assert odd.name.isascii()
    assert len(odd.name) < 60


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n \n", "must hold a prompt on each line, it is empty"),
        ('a\n{"prompt": "b", "steps": 3}', "prompts.txt, line 2: unknown key 'steps'; a prompt has prompt, negative"),
        ('{"prompt": ', "line 1: a line that starts with a brace must be a JSON object"),
        ('{"name": "b"}', "prompt must be a text, got none"),
        ('{"prompt": "b", "seed": "3"}', "seed must be a int, got '3'"),
        ('{"prompt": "b", "seed": true}', "seed must be a int, got True"),
        ('{"prompt": "b", "seed": -2}', "seed must be in"),
        ('{"prompt": "b", "image": "no.png"}', "image must be a picture file, there is none at no.png"),
        ('{"prompt": "b", "name": "../b"}', "name must be a file name"),
        ('{"prompt": "b", "name": ".b"}', "name must be a file name"),
        (
            '{"prompt": "b", "name": "x.Dense"}',
            "name must be a file name .* or one of .compare, .dense, .reuse at its end",
        ),
        ('{"prompt": "  "}', "prompt must be a text, got none"),
        ('{"prompt": ' + "[" * 100_000, "line 1: a line that starts with a brace must be a JSON object"),
        ('{"prompt": "a \\ud800 cat"}', "line 1: prompt must be text, it holds half a character"),
        ("a cat\na dog\na cat", "line 3: the name 'a-cat-[0-9a-f]+' is that of prompts.txt, line 1"),
        ('{"prompt": "b", "name": "A"}\n{"prompt": "c", "name": "a"}', "line 2: the name 'a' is that of"),
    ],
)
def test_read_jobs_refuses(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        _read(tmp_path, text)


def test_read_jobs_refuses_a_missing_file() -> None:
    with pytest.raises(ValueError, match="generate.prompts=nowhere.txt must be a text file"):
        read_jobs(GenerateConfig(prompts="nowhere.txt"))


def test_with_seeds_fills_in_what_was_drawn(tmp_path: Path) -> None:
    jobs = _read(tmp_path, 'a\n{"prompt": "b", "seed": 4}', seed=-1)
    assert [job.seed for job in with_seeds(jobs, 77)] == [77, 4]
    assert [job.name for job in with_seeds(jobs, 77)] == [job.name for job in jobs]
