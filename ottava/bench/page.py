"""The shell of every page: one file that opens anywhere, offline. No script runs in it, its content
policy forbids loading anything, and every string that goes through here is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .charts import NUM_COLORS, number


def table(head: Sequence[str], body: Sequence[Sequence[str]], *, prose: bool = False) -> str:
    """A table of texts; the first column is the label. prose: sentences, which wrap."""
    cells = "".join(f"<th>{escape(h)}</th>" for h in head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in body
    )
    kind = ' class="prose"' if prose else ""
    return f'<div class="wide"><table{kind}><tr>{cells}</tr>{rows}</table></div>'


def facts(values: Mapping[str, Any]) -> str:
    """A two-column table of names and values."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return number(value)
        return json.dumps(value) if isinstance(value, dict | list) else str(value)

    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(text(v))}</td></tr>" for k, v in values.items()
    )
    return f'<table class="facts">{rows}</table>'


def page(
    title: str, summary: str, body: Sequence[str], data: Mapping[str, Any] | None = None
) -> str:
    """The whole document. `body`: finished HTML; `data`: kept in the page as JSON."""
    raw = ""
    if data is not None:
        # "<" is escaped as JSON text, so no string in the data can end the block.
        text = json.dumps(data, default=str).replace("<", "\\u003c")
        raw = f'<script type="application/json" id="data">{text}</script>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(summary)}</p>{''.join(body)}{raw}</body></html>\n"
    )


def _colors() -> str:
    hues = ("#4269d0", "#e07a1f", "#3a9a4a", "#c9405e", "#8a5cc9", "#7f868f", "#1f9bb5", "#b59a1f")
    assert len(hues) == NUM_COLORS
    return "".join(
        f".s{i}{{stroke:{hue}}}.f{i}{{fill:{hue}}}.b{i}{{background:{hue}}}"
        for i, hue in enumerate(hues)
    )


_STYLE = (
    ":root{color-scheme:light dark;--ink:#1b1f24;--dim:#68707a;--rule:#d9dde2;--paper:#fff}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--dim:#98a1ab;--rule:#353b43;"
    "--paper:#14171b}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);"
    "max-width:940px;margin:32px auto;padding:0 18px}"
    "h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;"
    "font-variant-numeric:tabular-nums}"
    "td,th{padding:4px 9px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child,.facts td{text-align:left}.facts td{white-space:normal;"
    "overflow-wrap:anywhere}th{color:var(--dim);font-weight:500}"
    "figure{margin:28px 0}figcaption{font-weight:600;margin-bottom:6px}"
    "svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--ink)}"
    ".end{text-anchor:end}.mid{text-anchor:middle}svg .dim{fill:var(--dim)}"
    ".cell{stroke:none}.grid{stroke:var(--rule)}.line{fill:none;stroke-width:1.8}.faint{fill:none;stroke-width:.7;"
    "opacity:.28}.spread{stroke:var(--ink);stroke-width:1.5}"
    ".legend span{margin-right:14px;font-size:13px;white-space:nowrap}"
    ".legend i{display:inline-block;width:10px;height:10px;margin-right:5px;border-radius:2px}"
    ".prose td{white-space:normal;text-align:left;overflow-wrap:anywhere}.prose th{text-align:left}"
    "pre{font-size:12px;overflow-x:auto;border:1px solid var(--rule);padding:10px}" + _colors()
)
