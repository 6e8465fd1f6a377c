"""report.html of a run: everything drawn, everything escaped, also from half a file."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from test_diagnose import Run

from ottava.bench.charts import MAX_COLUMNS, MAX_ROWS, heat
from ottava.bench.report import write_report
from ottava.cli import main
from ottava.monitor.metrics import MetricsWriter

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
                 "Weights and gradients at step 100"):  # fmt: skip
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


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a Chromium")
def test_a_browser_draws_it_and_runs_nothing(tmp_path):
    page = write_report(hostile_run(tmp_path))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/c",
               "--virtual-time-budget=2000"]  # fmt: skip
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    if done.returncode:
        pytest.skip(f"Chromium does not start here: {done.stderr[-200:]}")
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)[1]
    assert title.startswith("Run: &lt;script&gt;") and done.stdout.count("<svg") >= 7
    picture = tmp_path / "page.png"
    subprocess.run([*command, f"--screenshot={picture}", "--window-size=1000,4200", page.as_uri()],
                   capture_output=True, timeout=120, check=False)  # fmt: skip
    assert picture.stat().st_size > 50_000
