"""Fill the pages from the files of the checkout, and lead their links to copies of those files on the site.

    python docs/hooks.py    rewrites what stands between such lines in every page

A page may have these pairs of lines; paths start at the top of the checkout. What is between them is written by this
script, and a test fails if it is out of date.

    <!-- file: examples/tutorials/timm.py -->           the file as a code block
    <!-- end -->
    <!-- file: examples/tutorials/timm.py#train -->     one function or class of it
    <!-- about: step-cpu -->                            date, device and versions of the newest file *-step-cpu.json
    <!-- table: step-cpu -->                            the tables of the newest *-step-cpu.md
    <!-- table: step-cpu | model; host ms -->           some columns of the first table that has them
    <!-- pivot: step-cpu | model | variant | time over eager -->    its first table with a row for each model, a column
                                                        for each variant, and these values; `| a; b` chooses columns
    <!-- best: ... -->                                  the same, and each row's smallest value in bold
    <!-- picture: step-cpu | what it shows -->          the newest *-step-cpu.png

A link to a result file leads to the newest of its kind. A link to a file outside of docs/ works on both sides: in the
checkout it opens the file, on the site a page with it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DIRECTIVE = re.compile(r"^(<!-- (\w+): (.+?) -->\n)(.*?)(^<!-- end -->)$", re.DOTALL | re.MULTILINE)
RESULT = re.compile(r"(?<=/benchmarks/results/)[\d-]{10}-([\w-]+)(\.\w+)(?=\))")
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".md": "markdown"}


def fenced(text: str, language: str, title: str = "") -> str:
    """Return a code block; the fence is longer than any in the text."""
    fence = "`" * (1 + max([2, *map(len, re.findall(r"`{3,}", text))]))
    return (
        f'{fence}{language} title="{title}"\n{text.strip()}\n{fence}'
        if title
        else f"{fence}{language}\n{text}\n{fence}"
    )


def definition(source: str, name: str) -> str:
    """Return the source of one function or class at the top of a file, with its decorators."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    raise ValueError(f"no function or class {name!r} at the top of the file")


def render_file(argument: str) -> str:
    """Render a file, or one definition in it, as a code block."""
    path, _, name = argument.partition("#")
    source = (ROOT / path).read_text()
    return fenced(definition(source, name) if name else source, LANGUAGES.get(Path(path).suffix, ""), path)


def newest(kind: str, suffix: str) -> Path:
    """Return the newest result file of a kind; the names start with the date."""
    found = sorted(file for file in RESULTS.glob(f"*{suffix}") if re.fullmatch(r"[\d-]{10}-" + kind, file.stem))
    if not found:
        raise ValueError(f"no file benchmarks/results/DATE-{kind}{suffix}")
    return found[-1]


def tables(kind: str) -> list[list[list[str]]]:
    """Return the tables of the newest result file of a kind, as rows of cells; the first row is the header."""
    blocks = re.findall(r"(?:^\|.*\n?)+", newest(kind, ".md").read_text(), re.MULTILINE)
    rows = [[[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in b.splitlines()] for b in blocks]
    return [[row for row in block if not set("".join(row)) <= set("-: ")] for block in rows]


def render_rows(rows: list[list[str]]) -> str:
    """Render rows as a Markdown table, numbers to the right."""
    number = re.compile(r"(\*\*)?[-+]?[\d,.]+( to [\d.]+)?(\*\*)?")
    right = [all(number.fullmatch(row[i]) for row in rows[1:] if row[i]) for i in range(len(rows[0]))]
    lines = [rows[0], ["---:" if r else "---" for r in right], *rows[1:]]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return re.sub(r"(\d) M\b", "\\1\N{NO-BREAK SPACE}M", text)


def render_about(kind: str) -> str:
    """Render where and when a result was measured, with a link to the file."""
    file = newest(kind, ".md")
    about = dict(line[2:].split(": ", 1) for line in file.read_text().splitlines() if line.startswith("- "))
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "python") if name in about)
    return f"Measured {about['date']}: {about['device']}; {versions}. [{file.name}](../benchmarks/results/{file.name})"


def render_table(argument: str) -> str:
    """Render every table of a result file, or some columns of the first that has them."""
    kind, *chosen = (part.strip() for part in argument.split("|"))
    if not chosen:
        return "\n\n".join(map(render_rows, tables(kind)))
    names = [name.strip() for name in chosen[0].split(";")]
    for rows in tables(kind):
        if {*names} <= {*rows[0]}:
            columns = [rows[0].index(name) for name in names]
            return render_rows([[row[column] for column in columns] for row in rows])
    raise ValueError(f"no table of {newest(kind, '.md').name} has the columns {names}")


def render_picture(argument: str) -> str:
    """Render the picture of a result, with its text for those who cannot see it."""
    kind, text = (part.strip() for part in argument.split("|"))
    return f"![{text}](../benchmarks/results/{newest(kind, '.png').name})"


def render_pivot(argument: str, *, best: bool = False) -> str:
    """Render one column of a result file as a table of rows and columns."""
    kind, row_names, column_name, value_name, *chosen = (part.strip() for part in argument.split("|"))
    header, *rows = tables(kind)[0]
    keys = [header.index(name.strip()) for name in row_names.split(",")]
    c, v = header.index(column_name), header.index(value_name)
    cells = {(", ".join(row[key] for key in keys), row[c]): row[v] for row in rows}
    columns = [name.strip() for name in chosen[0].split(";")] if chosen else list(dict.fromkeys(row[c] for row in rows))
    if unknown := set(columns) - {column for _, column in cells}:
        raise ValueError(f"{newest(kind, '.md').name} has no {column_name} {sorted(unknown)}")
    lines = [[f"{row_names}: {value_name}", *columns]]
    for name in dict.fromkeys(row for row, _ in cells):
        values = [cells.get((name, column), "") for column in columns]
        if best:
            least = min(float(value) for value in values if value)
            values = [f"**{value}**" if value and float(value) == least else value for value in values]
        lines.append([name, *values])
    return render_rows(lines)


RENDER: dict[str, Callable[[str], str]] = {
    "file": render_file,
    "about": render_about,
    "table": render_table,
    "picture": render_picture,
    "pivot": render_pivot,
    "best": partial(render_pivot, best=True),
}


def fill(markdown: str) -> str:
    """Write between each pair of lines what the first one names, and the newest date into links to result files."""
    filled = DIRECTIVE.sub(lambda found: f"{found[1]}\n{RENDER[found[2]](found[3])}\n\n{found[5]}", markdown)
    return RESULT.sub(lambda found: newest(found[1], found[2]).name, filled)


def emptied(markdown: str) -> str:
    """Return a page without what `fill` writes."""
    return DIRECTIVE.sub("", markdown)


def source_uri(path: Path) -> str:
    """Return where the site keeps a file of the checkout: pictures as they are, text as a page."""
    name = f"source/{path.relative_to(ROOT).as_posix()}"
    return name if path.suffix in (".png", ".svg") else f"{name}.md"


def linked(markdown: str, page: Path) -> list[Path]:
    """Return the files outside of docs/ that a page links to."""
    targets = [Path(os.path.normpath(page.parent / target)) for _, target in LINK.findall(markdown)]
    return [target for target in targets if not target.is_relative_to(ROOT / "docs")]


def on_files(files: Any, config: Any) -> Any:
    """Add to the site the files of the checkout that pages link to."""
    from mkdocs.structure.files import File

    for page in [file for file in files if file.is_documentation_page()]:
        for path in linked(page.content_string, Path(page.abs_src_path)):
            uri = source_uri(path)
            if files.get_file_from_path(uri) is None:
                if uri.endswith(".md"):
                    name = path.relative_to(ROOT).as_posix()
                    text = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {name}\n\n"
                    text += fenced(path.read_text(), LANGUAGES.get(path.suffix, ""))
                    files.append(File.generated(config, uri, content=text))
                else:
                    files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page to files of the checkout at their copies on the site."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    here = Path(page.file.abs_src_path).parent

    def moved(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / found[2]))
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        return found[1] + os.path.relpath(ROOT / "docs" / source_uri(target), here)

    return LINK.sub(moved, markdown)


def main() -> None:
    """Fill every page."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(fill(page.read_text()))


if __name__ == "__main__":
    main()
