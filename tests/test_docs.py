"""What the documentation names exists: options, files, scripts, headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pensieve.scripts.bench import steps, tiers

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "BENCHMARKS.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = ("builder", "plugins", "runtime", "scheduler", "scripts")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")

OTHER_PROGRAMS = {
    "compute-sanitizer": {"--tool"},
    "podman": {"--stop-timeout"},
    "pytest": {"--noconftest"},
    "schemathesis": {"--checks", "--max-time"},
    "tritonserver": {"--exit-timeout-secs", "--model-control-mode", "--model-repository"},
}
NOT_BUILT = {"--read-buffer-layers"}  # the pages say why


def known_options() -> set[str]:
    """Options of all parsers, by the literals in the code; a flag may be switched off too."""
    known = {"--help"}
    for room in ROOMS:
        for source in (ROOT / room).rglob("*.py"):
            text = source.read_text()
            known.update(re.findall(r'"(--[a-z][a-z0-9-]*)"', text))
            flags = re.findall(r'option\("--([a-z-]+)"[^)]*BooleanOptionalAction', text)
            known.update(f"--no-{flag}" for flag in flags)
    made = (action for module in (steps, tiers) for action in module.parser()._actions)
    return known.union(option for action in made for option in action.option_strings)  # these they make from tables


def test_every_option_that_a_page_names_exists():
    known = known_options().union(NOT_BUILT, *OTHER_PROGRAMS.values())
    named = {(page.name, option) for page in PAGES for option in OPTION.findall(page.read_text())}
    assert len(named) > 100
    assert not sorted((page, option) for page, option in named if option not in known)


def test_every_script_that_a_page_names_exists():
    named = {name for page in PAGES for name in re.findall(r"pensieve\.scripts\.([\w.]*\w)", page.read_text())}
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / "scripts" / f"{name.replace('.', '/')}.py").exists()]


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings have."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if name.startswith("http"):
            continue
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link
