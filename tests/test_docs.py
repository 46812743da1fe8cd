"""Names in the documentation exist: options, files, scripts, headings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks import steps, tiers, versus
from benchmarks.check.house import reading_path, tokens
from pensieve.runtime.launch import options, options_page

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MOST_LINES = {"README.md": 160, "BENCHMARKS.md": 300}
ROOMS = ("builder", "plugins", "runtime", "scheduler", "scripts", "benchmarks")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")

OTHER_PROGRAMS = {
    "dynamo": {
        "--http-port",
        "--router-disk-cache-hit-weight",
        "--router-host-cache-hit-weight",
        "--router-mode",
        "--router-session-affinity-ttl-secs",
    },
    "aiperf": {
        "--artifact-dir",
        "--concurrency",
        "--endpoint-type",
        "--extra-inputs",
        "--num-sessions",
        "--output-tokens-mean",
        "--random-seed",
        "--session-header",
        "--session-turns-mean",
        "--session-turns-stddev",
        "--streaming",
        "--synthetic-input-tokens-mean",
        "--tokenizer",
    },
    "compute-sanitizer": {"--tool"},
    "pip": {"--extra-index-url"},
    "podman": {"--stop-timeout"},
    "pytest": {"--noconftest", "--pid", "--dist"},
    "sglang": {
        "--enable-mixed-chunk",
        "--schedule-policy",
        "--stream-interval",
        "--tokenizer-worker-num",
    },
    "vllm": {"--gdn-prefill-backend"},
    "schemathesis": {"--checks", "--max-time"},
    "hf": {"--local-dir"},
    "tritonserver": {"--exit-timeout-secs", "--model-control-mode", "--model-repository"},
}
NOT_BUILT = {"--read-buffer-layers"}  # the pages say why


def built_options() -> set[str]:
    """Options of all parsers, by the literals in the code; a flag may be switched off too."""
    all_options = {"--help"}
    for room in (*ROOMS, "deploy"):
        for source in (ROOT / room).rglob("*.py"):
            text = source.read_text()
            all_options.update(re.findall(r'"(--[a-z][a-z0-9_-]*)"', text))
            flags = re.findall(r'option\("--([a-z-]+)"[^)]*BooleanOptionalAction', text)
            all_options.update(f"--no-{flag}" for flag in flags)
    parsers = (options.parser(), steps.parser(), tiers.parser(), versus.parser())
    actions = (action for parser in parsers for action in parser._actions)
    from_table = (option for action in actions for option in action.option_strings)
    return all_options.union(from_table)  # these it makes from a table


def test_the_page_of_options_is_current():
    """`python -m pensieve.runtime.launch.options_page > docs/use/options.md` makes it so."""
    assert (ROOT / "docs" / "use" / "options.md").read_text() == options_page.page()


def test_every_option_that_a_page_names_exists():
    options = built_options().union(NOT_BUILT, *OTHER_PROGRAMS.values())
    named = {(page.name, option) for page in PAGES for option in OPTION.findall(page.read_text())}
    assert len(named) > 100
    assert not sorted((page, option) for page, option in named if option not in options)


def test_every_script_that_a_page_names_exists():
    module = re.compile(r"(?<!\w)(?:pensieve\.(?=scripts\.)|(?=benchmarks\.))(\w+(?:\.\w+)+)")
    named = {name for page in PAGES for name in module.findall(page.read_text())}
    assert len(named) > 10
    places = {name: ROOT / name.replace(".", "/") for name in named}
    assert not [
        name
        for name, path in places.items()
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())
    ]


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings have."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if name.startswith("http"):
            continue
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def links(page: Path) -> set[Path]:
    return {
        (page.parent / name).resolve()
        for name in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", page.read_text())
        if not name.startswith("http")
    }


def test_the_index_leads_to_every_page():
    """By one link, or from BENCHMARKS.md or the page of a folder in the index."""
    index = ROOT / "docs" / "README.md"
    linked = links(index) | links(ROOT / "BENCHMARKS.md")
    assert not [
        page for page in PAGES if page.parent != ROOT and page != index and page not in linked
    ]


def test_every_figure_is_shown():
    shown = set().union(*map(links, PAGES))
    assert not [figure for figure in (ROOT / "docs" / "figures").iterdir() if figure not in shown]


def test_no_page_has_an_unresolved_merge():
    assert not [
        page for page in PAGES if re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_first_page_is_short(name: str):
    assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES[name]


SOURCES = [source for room in (*ROOMS, "tests") for source in (ROOT / room).rglob("*.py")]


def test_every_page_that_the_code_names_exists():
    named = {
        (source.name, page)
        for source in SOURCES
        for page in re.findall(r"\bdocs/[\w/-]+\.md", source.read_text())
        if source != Path(__file__)
    }
    assert len(named) > 10
    assert not [(source, page) for source, page in named if not (ROOT / page).exists()]


def test_the_reading_path_is_short():
    """Its files exist, and together they have at most as many tokens as its page says."""
    files = reading_path()
    assert len(files) > 20
    assert tokens(files) <= 47_600


def test_every_file_that_a_page_names_exists():
    place = re.compile(
        rf"(?<![\w/.-])(?:{'|'.join((*ROOMS, 'tests', 'deploy'))})/[\w/.-]*\w\.[a-z]+\b"
    )
    named = {(page.name, file) for page in PAGES for file in place.findall(page.read_text())}
    assert len(named) > 50
    assert not sorted((page, file) for page, file in named if not (ROOT / file).exists())


def test_the_openai_tests_are_as_many_as_the_readme_says_and_each_says_what_is_expected():
    files = sorted((ROOT / "tests" / "conformance").glob("test_*.py"))
    trees = [ast.parse(file.read_text()) for file in files]
    tests = [
        node
        for tree in trees
        for node in tree.body
        if getattr(node, "name", "").startswith("test_")
    ]
    assert f"tries {len(tests)} things" in (ROOT / "README.md").read_text()
    assert all(ast.get_docstring(test) for test in tests)
