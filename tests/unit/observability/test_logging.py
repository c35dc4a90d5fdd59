"""Log records name their rank and hold no secrets."""

from __future__ import annotations

import logging

import pytest

from dbsp_megatron.observability.logging import get_logger, setup_logging


def test_get_logger_stays_below_the_package() -> None:
    assert get_logger().name == "dbsp_megatron"
    assert get_logger("dbsp_megatron.plan.cache").name == "dbsp_megatron.plan.cache"
    assert get_logger("__main__").name == "dbsp_megatron.__main__"
    assert get_logger("dbsp_megatron_other").name == "dbsp_megatron.dbsp_megatron_other"


@pytest.mark.parametrize(("rank", "shown"), [(0, ["information", "warning"]), (3, ["warning"])])
def test_setup_logging_shows_information_on_rank_0_only(
    capsys: pytest.CaptureFixture[str], package_logger: logging.Logger, rank: int, shown: list[str]
) -> None:
    setup_logging(rank)
    for level, text in ((logging.DEBUG, "detail"), (logging.INFO, "information"), (logging.WARNING, "warning")):
        get_logger("part").log(level, text)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert [line.split(": ")[-1] for line in lines] == shown
    assert all(f"[rank {rank}]" in line for line in lines)


def test_setup_logging_again_replaces_the_handler(
    capsys: pytest.CaptureFixture[str], package_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    setup_logging(0)
    setup_logging()
    get_logger().warning("once")
    assert capsys.readouterr().err.count("once") == 1
    get_logger().warning("who")
    assert "[rank 2]" in capsys.readouterr().err


def test_records_and_tracebacks_hold_no_secrets(
    capsys: pytest.CaptureFixture[str], package_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "value-of-the-token")
    setup_logging(0)
    get_logger().info("download with %s", "value-of-the-token")
    try:
        raise RuntimeError("https://me:pass1234@host refused; api_key=abcdef")
    except RuntimeError:
        get_logger().exception("failed")
    text = capsys.readouterr().err
    assert not [secret for secret in ("value-of-the-token", "pass1234", "abcdef") if secret in text]
    assert "RuntimeError" in text
