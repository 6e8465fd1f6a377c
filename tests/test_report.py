"""report.html of a run: everything drawn, everything escaped, also from half a file."""

import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy
import pytest
from test_diagnose import Run
from tiny_run import tiny_run

from ottava.bench.charts import MAX_COLUMNS, MAX_ROWS, heat
from ottava.bench.report import write_report
from ottava.cli import main
from ottava.monitor.metrics import MetricsWriter
from ottava.train.trainer import Trainer

HOSTILE = "<script>document.title='owned'</script>\"'&"


def hostile_run(folder):
    run = Run()
    run.start |= {"name": HOSTILE, HOSTILE: HOSTILE}
    run.config["out"] = HOSTILE
    for look in run.looks.values():
        look["rows"][HOSTILE] = {HOSTILE: {"saturated": 0.5, "underflowed": 0.5, "error_db": 1.0}}
        look["parameters"][HOSTILE] = {"grad_norm": 1.0}
    run.bad(50, cause=HOSTILE)
    run.more = [
        ("heal", 60, {"text": f"step 60: went back to step 40 {HOSTILE}", "row": HOSTILE}),
        ("event", 61, {"text": HOSTILE}),
        ("memory", 2, {"gib": {"weights": 1.0, HOSTILE: 2.0, "peak": 5.0}}),
        ("time", 99, {"ms": {"forward": 3.0, "backward": 5.0, HOSTILE: 1.0}}),
        (
            "profile",
            6,
            {
                "groups": {"linear": 7.0, HOSTILE: 1.0},
                "advice": [[HOSTILE, HOSTILE], 3],
                "rows": [{"row": HOSTILE, "kind": HOSTILE, "forward_ms": 1.0}, HOSTILE],
            },
        ),
    ]
    return run.write(folder)


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_shows_all_and_every_string_stays_text(tmp_path):
    page = write_report(hostile_run(tmp_path)).read_text()
    tags = Tags(page).tags
    assert "<script" not in page and "default-src 'none'" in page
    assert not any(k.startswith("on") for _, attrs in tags for k in attrs)
    for word in ("Loss", "Gradient norm", "Saturated:", "Underflowed:", "Memory", "Time of a step",
                 "waiting for data", "What diagnose says", "went back to step 40",
                 "Weights and gradients at step 100", "by its parts", "Time by group (profiled)",
                 "Gradient norms: share of the parameters"):  # fmt: skip
        assert word in page, word
    assert "within a step: 2 GiB" in page  # 5 at the peak, 3 between steps


def test_losses_of_several_runs_are_drawn_into_one_plot(tmp_path, capsys):
    for name in ("one", "two", "three"):
        run = Run()
        run.start["name"] = name
        run.write(tmp_path / name)
    page = write_report(tmp_path / "one", beside=[tmp_path / "two", tmp_path / "three"]).read_text()
    first = page[: page.index("Gradient norm")]
    assert all(re.search(rf"</i>{name}</span>", first) for name in ("one", "two", "three"))
    paths = [str(tmp_path / n) for n in ("one", "two")]
    assert main(["report", *paths, "--out", str(tmp_path / "x.html")]) == 0
    assert "two, validation" in (tmp_path / "x.html").read_text()
    assert main(["report", paths[0], str(tmp_path / "nothing")]) == 2
    assert "holds neither compare.json nor run.jsonl" in capsys.readouterr().err


def test_what_is_not_there_is_left_out(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("step", 1, loss=float("nan"))
    writer.close()
    with (tmp_path / "run.jsonl").open("a") as f:
        f.write('{"kind": "observe", "step": 2}\n{"kind": "st')
    page = write_report(tmp_path).read_text()
    Tags(page)
    assert "half-written" in page and "not finished after 1 steps" in page


def test_a_heat_map_of_many_rows_and_steps_stays_small_and_keeps_the_worst():
    rows = [(f"row {i}", dict.fromkeys(range(500), 1e-06)) for i in range(200)]
    rows[150][1][333] = 0.5
    rows[7][1][0] = float("nan")
    text = heat(rows, title="Shares")
    assert f"the worst {MAX_ROWS} of 200 rows" in text and "row 150, step 33" in text
    assert text.count("<rect") == 1 and "50.00%" in text and len(text) < 40_000
    assert 'fill-opacity="0.93"' in text
    assert "Nothing was measured" in heat([], title="Shares") and MAX_COLUMNS == 100


def test_gradient_norms_are_counted_by_powers_of_ten(tmp_path):
    writer = MetricsWriter(tmp_path)
    norms = [0.5, 0.2, 30.0, 0.0, float("inf"), float("nan"), None]
    for step in (5, 10):
        parameters = {f"p{i}": {"grad_norm": n} for i, n in enumerate(norms)}
        writer.write("observe", step, rows={}, parameters=parameters)
    writer.close()
    page = write_report(tmp_path).read_text()
    Tags(page)
    assert page.count("1e-1 to 1e0, step 5: 33.33%") == 1 and "1e1 to 1e2, step 10: 16.67%" in page
    assert "zero, or not finite, step 5: 50.00%" in page


def test_a_folder_of_another_version_is_shown_as_far_as_it_goes(tmp_path):
    lines = [
        '{"kind": "start", "step": 0, "version": 99, "name": "later", "speed": 3}',
        '{"kind": "step", "step": 1, "loss": "inf"}', '{"kind": "step", "step": 2, "loss": [1]}',
        '{"kind": "observe", "step": 2, "rows": 3, "parameters": {"a": 1}}',
        '{"kind": "memory", "step": 2, "gib": {"peak": "x"}}', '{"kind": "time", "step": 2, "ms": 1}',
        '{"kind": "profile", "step": 2, "groups": {"a": null}, "rows": {}}',
        '{"kind": "eval", "step": "2"}', "[1, 2]", '{"kind": "step", "st',
    ]  # fmt: skip
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    page = write_report(tmp_path).read_text()
    Tags(page)
    assert "Run: later" in page and "written by metrics version 99" in page
    assert page.count("not a metrics line") == 2 and "half-written" in page


CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)


def browse(folder, page, *arguments):
    """What Chromium prints for a page; skips where it does not start."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000",
               f"--user-data-dir={folder}/c", *arguments, page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        pytest.skip(f"Chromium does not start here: {done.stderr[-200:]}")
    return done.stdout


def pixels(path):
    """RGB of a PNG that Chromium wrote, uint8 [height, width, 3]."""
    data, at, found = path.read_bytes(), 8, b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        part = data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", part[:10])
        found += part if kind == b"IDAT" else b""
        at += size + 12
    assert depth == 8 and color in (2, 6)
    each = 3 if color == 2 else 4
    rows = numpy.frombuffer(zlib.decompress(found), numpy.uint8).reshape(height, 1 + width * each)
    out = numpy.zeros((height, width, each), numpy.uint8)
    for y, row in enumerate(rows):
        line = row[1:].reshape(width, each).astype(int)
        above = out[y - 1].astype(int) if y else numpy.zeros_like(line)
        if row[0] in (0, 2):
            out[y] = line + (above if row[0] == 2 else 0)
            continue
        left, corner = numpy.zeros(each, int), numpy.zeros(each, int)
        for x in range(width):
            up = above[x]
            guess = {1: left, 3: (left + up) // 2}.get(int(row[0]))
            if guess is None:
                p = left + up - corner
                a, b, c = abs(p - left), abs(p - up), abs(p - corner)
                guess = numpy.where((a <= b) & (a <= c), left, numpy.where(b <= c, up, corner))
            left, corner = (line[x] + guess) & 255, up
            out[y, x] = left
    return out[:, :, :3]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
def test_a_browser_draws_a_real_run_and_runs_nothing(tmp_path):
    """A run whose name is hostile: every plot has its colours, and the name is text."""
    sections = {"monitor": {"every": 2}, "train": {"eval_every": 3, "eval_batches": 1}}
    run = replace(tiny_run(tmp_path, "fp8", steps=8, **sections), name=HOSTILE)
    Trainer(run).run(quiet=True)
    page = write_report(run.out)
    dom = browse(tmp_path, page, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom, re.S)[1]
    assert title.startswith("Run: &lt;script&gt;") and "owned" not in title.split("'")[0]
    assert dom.count("<svg") >= 7 and "<script" not in dom
    picture = tmp_path / "page.png"
    browse(tmp_path, page, f"--screenshot={picture}", "--window-size=600,2600")
    seen = pixels(picture).reshape(-1, 3).astype(int)
    for hue in ("4269d0", "e07a1f", "3a9a4a"):  # loss, validation loss, the other curves
        color = numpy.array([int(hue[i : i + 2], 16) for i in (0, 2, 4)])
        assert (abs(seen - color).max(1) < 24).sum() > 60, hue
