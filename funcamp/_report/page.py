"""A numerics report as one HTML page: no script, no style sheet, no picture from elsewhere."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from funcamp._report.render import COLUMNS, cells

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
pre, td { font: 12px/1.4 ui-monospace, monospace } pre { overflow-x: auto; background: #f6f6f6; padding: 1em }
table { border-collapse: collapse } td, th { padding: 1px 8px; text-align: left; white-space: nowrap }
th { position: sticky; top: 0; background: #fff; border-bottom: 1px solid #999; font-size: 12px }
tr.made { background: #fdd } tr.flushed { background: #fff3cd } img { max-width: 100% }
"""


def write(
    path: Path,
    title: str,
    sentences: list[str],
    tree: str,
    picture: bytes | None,
    caption: str,
    rows: list[dict[str, Any]],
) -> Path:
    """The page of `NumericsReport.to_html`."""
    lines = []
    for row in rows:
        kind = "made" if row["creates"] else ("flushed" if row["underflow"] > 0.01 else "")
        line = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row))
        lines.append(f'<tr class="{kind}">{line}</tr>')
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    said = "".join(f"<li>{html.escape(line)}</li>" for line in sentences)
    image = ""
    if picture is not None:
        encoded = base64.b64encode(picture).decode()
        image = f'<h2>Exponents</h2><img alt="exponents of every operation" src="data:image/png;base64,{encoded}">'
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><ul>{said}</ul>",
        f"<h2>Modules</h2><pre>{html.escape(tree)}</pre>{image}",
        f"<h2>Operations</h2><p>{html.escape(caption.capitalize())}.</p>",
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></body></html>\n",
    ]
    path.write_text("".join(parts), encoding="utf-8")
    return path
