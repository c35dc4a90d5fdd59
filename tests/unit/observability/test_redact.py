"""Secrets never reach a file or a log; sizes that merely sound like secrets do."""

from __future__ import annotations

import pytest

from dbsp_megatron.observability.redact import is_secret, redact_command, redact_mapping, redact_text


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "abc", True),
        ("--hub-token", "abc", True),
        ("hftoken", "12345", True),
        ("db.password", "1234", True),
        ("max_password", "1234", True),
        ("client_secret", "x", True),
        ("num_tokens", "4096", False),
        ("tokens_per_step", 4096, False),
        ("num_tokens", "hunter2", True),
        ("key_dim", "64", False),
        ("learning_rate", "0.1", False),
    ],
)
def test_is_secret_tells_credentials_from_sizes(name: str, value: object, secret: bool) -> None:
    assert is_secret(name, value) is secret


def test_redact_command_masks_every_spelling_of_a_flag() -> None:
    words = [
        "train.py", "--api-key", "AAA", "--token=BBB", "WANDB_API_KEY=CCC", "--hub.secret", "-DDD", "--num-tokens",
        "77", "--use-token", "--steps", "5", "--url", "https://me:EEE@host/x", "--extra", '{"token": "FFF"}',
    ]  # fmt: skip
    shown = redact_command(words, environ={})
    assert not [secret for secret in ("AAA", "BBB", "CCC", "DDD", "EEE", "FFF") if secret in " ".join(shown)]
    assert shown[1:5] == ["--api-key", "***", "--token=***", "WANDB_API_KEY=***"]
    assert [word in shown for word in ("--num-tokens", "77", "--use-token", "--steps", "5")] == [True] * 5
    assert "https://***@host/x" in shown


def test_redact_text_masks_known_values_and_shapes_but_not_prose() -> None:
    environ = {"HF_TOKEN": "plain-looking-value", "OMP_NUM_THREADS": "1"}
    assert redact_text("got plain-looking-value here", environ) == "got *** here"
    assert redact_text("Authorization: Bearer abcdefghijk", {}) == "Authorization: Bearer ***"
    assert "hf_" not in redact_text("used hf_abcdefghijklmnopqrst", {})
    assert redact_text("api_key='s3', next", {}) == "api_key=***, next"
    for harmless in ("unknown key: sp.foo", "tokens: 4096 per rank", "loss=1.5 monkey=7"):
        assert redact_text(harmless, environ) == harmless


def test_redact_mapping_masks_nested_values_and_keeps_empty_ones() -> None:
    shown = redact_mapping({"hub": {"token": "abc", "name": "x"}, "keys": ["a", "b"], "token": None, "steps": 3})
    assert shown == {"hub": {"token": "***", "name": "x"}, "keys": ["***", "***"], "token": None, "steps": 3}
