"""The report of a run is one page that needs nothing else, and that a browser shows whole."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dbsp_megatron.observability.html_report import SECTIONS, write_report
from tests.unit.observability.run_folders import make_run

_VOID = {"meta", "link", "img", "image", "br"}


class _Page(HTMLParser):
    """Checks nesting, and collects ids and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action", "data"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _page(folders: list[Path], output: Path) -> str:
    write_report(folders, output)
    text = output.read_text(encoding="utf-8")
    page = _Page(text)
    assert page.addresses
    assert all(address.startswith("data:") for address in page.addresses), "loads something from elsewhere"
    assert "<script" not in text
    assert not re.search(r"url\(|@import", text)
    return text


def test_report_has_every_section_with_charts_and_units(tmp_path: Path) -> None:
    text = _page([make_run(tmp_path)], tmp_path / "report.html")
    assert _Page(text).ids == [name for name, _ in SECTIONS]
    assert text.count("<svg") >= 14
    assert "Nothing was logged" not in text
    for expected in ("finished", "auto", "U2R2:3 U4R1:2", "dense blocks", "max / mean", "TFLOP/s", "GiB",
                     "method: topp", "No limit of"):  # fmt: skip
        assert expected in text, expected
    # A name from the command line is text, not markup.
    assert "&lt;b&gt;r&lt;/b&gt;" in text
    assert "<b>" not in text


def test_report_of_a_run_cut_short_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=6, imbalance=1.6, done=False)
    (folder / "layers.jsonl").unlink()
    text = _page([folder], tmp_path / "report.html")
    assert "not finished" in text
    assert "6 of 12" in text
    assert "imbalance under plans is high" in text
    assert "No layers.jsonl" in text
    assert "No pictures" in text


def test_report_of_a_run_without_a_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1, done=False)
    for name in ("metrics.jsonl", "layers.jsonl"):
        (folder / name).write_text("")
    assert "Nothing was logged" in _page([folder], tmp_path / "report.html")


def test_report_compares_runs(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, "first"), make_run(tmp_path, "second", imbalance=1.2, done=False)]
    text = _page(folders, tmp_path / "both.html")
    ids = _Page(text).ids
    assert ids[0] == "compare"
    assert len(ids) == len(set(ids)) == 1 + 2 * (1 + len(SECTIONS))
    compared = text[text.index('id="compare"') : text.index("</section>")]
    assert re.search(r"sp/imbalance_after, mean</td><td>max / mean</td><td>1\.05</td><td>1\.2</td>", compared)


def test_report_is_written_whole_and_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path)
    started = time.process_time()
    write_report([folder], tmp_path / "report.html")
    assert time.process_time() - started < 1
    before = (tmp_path / "report.html").read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report([folder, folder], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "report.html"]
    with pytest.raises(ValueError, match="no run folder given"):
        write_report([], tmp_path / "x.html")


_PROBE = """<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(
    (e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".wide, pre, svg"));
  const asked = performance.getEntriesByType("resource").filter((e) => !e.name.startsWith("data:"));
  const broken = [...document.images].filter((e) => !e.complete || !e.naturalWidth);
  const flat = [...document.querySelectorAll("svg")].filter(
    (e) => !e.closest("details:not([open])") && e.getBoundingClientRect().height < 50);
  document.body.dataset.probe = JSON.stringify({
    over: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    wide: wide.length, asked: asked.length, broken: broken.length,
    flat: flat.length, sections: document.querySelectorAll("section").length});
});
</script>"""


@pytest.fixture
def chromium() -> str:
    """A Chromium binary."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    return found


def _browse(chromium: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    profile = folder / "profile"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-background-networking", f"--user-data-dir={profile}", "--enable-logging=stderr",
               "--virtual-time-budget=3000", *flags]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 500])
def test_browser_shows_the_whole_page(chromium: str, tmp_path: Path, width: int) -> None:
    """No error in its console, nothing asked for, nothing wider than the window, no chart without height."""
    folders = [make_run(tmp_path, "first"), make_run(tmp_path, "second", done=False)]
    for name, chosen in (("one", folders[:1]), ("both", folders)):
        text = _page(chosen, tmp_path / f"{name}.html")
        probed = tmp_path / f"{name}_probed.html"
        probed.write_text(text.replace("</head>", f"{_PROBE}</head>"), encoding="utf-8")
        done = _browse(chromium, tmp_path, f"--window-size={width},2000", "--dump-dom", f"file://{probed}")
        (found,) = re.findall(r'data-probe="([^"]+)"', done.stdout)
        sections = len(SECTIONS) * len(chosen) + (len(chosen) > 1)
        expected = f'{{"over":0,"wide":0,"asked":0,"broken":0,"flat":0,"sections":{sections}}}'
        assert found.replace("&quot;", '"') == expected
        assert "CONSOLE" not in done.stderr, done.stderr


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_browser_draws_in_light_and_dark(chromium: str, tmp_path: Path, dark: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    page, picture = tmp_path / "one.html", tmp_path / "one.png"
    _page([make_run(tmp_path)], page)
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    _browse(chromium, tmp_path, "--window-size=1280,3000", f"--screenshot={picture}", *flags, f"file://{page}")
    pixels = np.asarray(image.open(picture).convert("L"), dtype=float)
    assert pixels.shape == (3000, 1280)
    assert (pixels[2, 2] < 60) == dark
    # Not blank anywhere: every stretch of the page has text or curves.
    assert all(part.std() > 4 for part in np.array_split(pixels[:2000], 8))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layers.jsonl", '{"step": 1}\n'),
        ("layers.jsonl", '{"step": 1, "layer": null}\n'),
        ("metrics.jsonl", '{"step": 1, "train/loss": 1.0, "sp/rank_load": 3, "nonfinite": null}\n'),
        ("metrics.jsonl", '{"step": 1, "train/loss": 1' + "0" * 400 + "}\n"),
        ("environment.json", '{"git": "x", "command": [1, 2], "devices": [3]}'),
        ("summary.json", '{"check": []}'),
        ("config.yaml", "wandb: {alert_imbalance: abc}\n"),
    ],
)
def test_report_of_a_damaged_run_shows_the_rest(tmp_path: Path, name: str, text: str) -> None:
    run = make_run(tmp_path / "a")
    (run / name).write_text(text)
    page = _Page(_page([run], tmp_path / "report.html"))
    assert [section for section in page.ids if section in dict(SECTIONS)] == [section for section, _ in SECTIONS]


def test_report_reads_around_bytes_that_are_no_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": \xff\n')
    assert "Cannot be drawn" not in _page([run], tmp_path / "report.html")


def test_report_masks_secrets_and_keeps_placeholders_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "$BODY")
    (run / "config.yaml").write_text("wandb: {api_key: topsecret123}\nnote: token=topsecret456\n")
    (run / "environment.json").write_text('{"command": ["dbsp-train", "--wandb.api_key", "topsecret789"]}')
    text = _page([run], tmp_path / "report.html")
    assert "topsecret" not in text
    assert _Page(text).ids.count("header") == 1
