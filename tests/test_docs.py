"""The pages of the site: their code runs, every public name is there, what they name exists, their words are plain."""

from __future__ import annotations

import inspect
import operator
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import funcamp
from docs import hooks
from funcamp import presets
from tests.support.public import CODE, PUBLIC, assert_python_runs, python_blocks

DOCS = Path(hooks.__file__).parent
PAGES = sorted(DOCS.rglob("*.md"))
#: These compile what they show.
COMPILED = {"first-day.md", "index.md"}
#: Pages with links.
LINKING = [*PAGES, DOCS.parent / "README.md", DOCS.parent / "benchmarks" / "README.md"]
SHOWN = [*PUBLIC, *(f"presets.{name}" for name in presets.__all__)]
#: Words to avoid, and what to write instead.
AVOID = {
    r"verdict": "the flag",
    r"whoever|nobody": "any caller; no code",
    r"mends?|mended": "corrects, recovers",
    r"ways? out|at work|of its own": "a plain adjective",
    r"held(?!-)|whole|alone": "stored; complete; only",
    r"tells?|told|says?|said": "returns, raises, reports, names",
    r"sees to": "sets",
    r"no host reads?": "no host synchronization",
}


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def prose(page: Path) -> str:
    """The text of a page, without code and without the targets of links."""
    text = re.sub(r"`[^`]*`", "", CODE.sub("", hooks.emptied(page.read_text())))
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.inductor] * (name_of(page) in COMPILED))
        for page in PAGES
        if python_blocks(page)
    ],
)
def test_code_of_a_page_runs(page: Path) -> None:
    assert_python_runs(page)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", CODE.sub("", text)):
        assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_has_what_its_files_have(page: Path) -> None:
    text = page.read_text()
    assert text == hooks.fill(text), "run python docs/hooks.py"
    assert "<!--" not in hooks.emptied(text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_of_a_page_are_plain(page: Path) -> None:
    for words, instead in AVOID.items():
        found = re.search(rf"[^.\n]*\b({words})\b[^.\n]*", prose(page), re.IGNORECASE)
        assert not found, f"{name_of(page)}: write {instead!r} for {found[1]!r} in: {found[0].strip()}"


def test_api_pages_have_every_public_name_once() -> None:
    shown = [name for page in PAGES for name in re.findall(r"^::: funcamp\.([\w.]+)$", page.read_text(), re.MULTILINE)]
    missing, unknown = set(SHOWN) - set(shown), set(shown) - set(SHOWN)
    assert not missing, f"write '::: funcamp.NAME' on a page of docs/api for {missing}"
    assert not unknown, f"no public name, but on a page of docs/api: {unknown}"
    assert len(shown) == len(set(shown))


def test_rules_page_has_a_row_of_every_preset() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "rules.md").read_text(), re.MULTILINE)
    shown = re.findall(r"`(\w+)\(", " ".join(rows))
    assert sorted(shown) == sorted(presets.__all__), "each preset has one row in the table of docs/rules.md"


@pytest.mark.parametrize("name", SHOWN)
def test_first_line_of_a_docstring_is_short(name: str) -> None:
    first = (inspect.getdoc(operator.attrgetter(name)(funcamp)) or "").split("\n")[0]
    assert 0 < len(first) <= 100
    assert first.endswith(".")


#: The first line inside of a row or a test, with words of the contract that it shows: it goes with the row.
QUOTE = re.compile(r'[(:]\n(?: *""".*"""\n)?((?: *# contract: ".+"\n)+)')


def promised_errors() -> list[str]:
    """Return the contract's sentences of an error, a refusal or a warning, and what its table refuses."""
    before, _, after = (DOCS / "contract.md").read_text().partition("| refused | write instead |")
    table, _, rare = after.partition("\n\n")
    sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=\.)\s", f"{before} {rare}")]
    promises = [sentence for sentence in sentences if re.search(r"\b(an error|is refused|warns)\b", sentence)]
    return promises + re.findall(r"^\| (\S.*?) \|", table, re.MULTILINE)


def test_each_error_of_the_contract_is_quoted_by_a_test_that_shows_it() -> None:
    promises = promised_errors()
    texts = [file.read_text() for file in (DOCS.parent / "tests").rglob("*.py")]
    lines = [line for text in texts for comment in QUOTE.findall(text) for line in comment.splitlines()]
    quotes = [line.strip().removeprefix('# contract: "').removesuffix('"') for line in lines]
    assert [promise for promise in promises if not any(words in promise for words in quotes)] == []
    assert [words for words in quotes if not any(words in promise for promise in promises)] == []


def test_recipes_page_has_every_recipe() -> None:
    shown = re.findall(
        r"^\| \[\w+\]\(\.\./examples/recipes/(\w+\.py)\)", (DOCS / "recipes.md").read_text(), re.MULTILINE
    )
    assert sorted(shown) == sorted(path.name for path in (DOCS.parent / "examples" / "recipes").glob("*.py"))


def test_no_measured_number_is_typed_on_the_performance_page() -> None:
    assert re.findall(r"\d+\.\d+|\d+ ?(?:%|ms|µs|s\b|MB)", prose(DOCS / "performance.md")) == []


def filled(directive: str) -> str:
    return hooks.fill(f"before\n\n<!-- {directive} -->\nof another day\n<!-- end -->\n\nafter")


def test_a_link_to_a_result_leads_to_the_newest_of_its_kind() -> None:
    newest = hooks.newest("price-cpu", ".md").name
    old = "[it](../benchmarks/results/2000-01-01-{}.md)"
    assert hooks.fill(old.format("price-cpu")) == f"[it](../benchmarks/results/{newest})"
    with pytest.raises(ValueError, match="no file benchmarks/results/DATE-no-such-result"):
        hooks.fill(old.format("no-such-result"))


def test_a_link_to_a_file_outside_of_the_pages_leads_to_its_copy_on_the_site() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="api/index.md", abs_src_path=str(DOCS / "api" / "index.md")))
    text = "[code](../../tests/test_docs.py), [page](../step.md#options), ![it](../../examples/train_gpt.png)"
    assert hooks.linked(text, DOCS / "api" / "index.md") == [Path(__file__), DOCS.parent / "examples" / "train_gpt.png"]
    assert hooks.on_page_markdown(text, page) == (
        "[code](../source/tests/test_docs.py.md), [page](../step.md#options), ![it](../source/examples/train_gpt.png)"
    )


@pytest.mark.parametrize(
    ("directive", "message"),
    [
        ("file: examples/recipes/typical.py#missing", "no function or class 'missing'"),
        ("table: no-such-result", "no file benchmarks/results/DATE-no-such-result.md"),
        ("table: step-cpu | model; colour", "no table of .*step-cpu.md has the columns"),
        ("pivot: step-cpu | model | variant | time over eager | optax", "has no variant"),
    ],
)
def test_a_page_that_asks_for_what_is_not_there_is_an_error(directive: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(directive)
