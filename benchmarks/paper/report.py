"""The papers' claims beside our values, and a verdict for each figure.

claims.json has for each figure of a paper its subject, its source, and claims by name: the paper's
value, or [words, least, most] with null for no bound. A value agrees if it is within `within` (a
share) of the paper's, or within the bounds. A claim without bounds is shown, but the verdict does
not count it. `why` explains a difference, `not_run` why there is no value.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import subplots

CLAIMS = Path(__file__).with_name("claims.json")
HOWS = {
    "hardware": "reproduced on hardware",
    "other settings": "on hardware with other settings",
    "cpu": "on a CPU with small models",
    "simulated": "simulated",
    "computed": "computed",
}
"""The best first."""
WITHIN = 0.15
AT_LEAST = ", at least"  # ends the name of a lower bound: either it or the value itself is found
BEGIN, END = "<!-- the table of `paper` -->", "<!-- its end -->"


class FigureValue(NamedTuple):
    """One of ours, and how it was found: a key of HOWS. With several `seeds` it is their mean."""

    number: float
    how: str
    seeds: tuple[float, ...] = ()

    @property
    def measured(self) -> bool:
        return self.how not in ("simulated", "computed")


ValuesByFigure = Mapping[str, Mapping[str, FigureValue]]
"""By figure and claim."""


class Claim(NamedTuple):
    """What the paper says, and the bounds of a value that agrees."""

    text: str
    least: float
    most: float

    @classmethod
    def read(cls, value: Any, within: float) -> Claim:
        if isinstance(value, list):
            text, least, most = value
            return cls(
                text,
                float("-inf") if least is None else least,
                float("inf") if most is None else most,
            )
        low, high = sorted((value * (1 - within), value * (1 + within)))
        return cls(f"{value:g}", low, high)

    def agrees(self, value: float) -> bool:
        return self.least <= value <= self.most

    @property
    def judged(self) -> bool:
        return (self.least, self.most) != (float("-inf"), float("inf"))


class Figure(NamedTuple):
    """An entry of claims.json."""

    number: str
    subject: str
    source: str
    claims: Mapping[str, Claim]
    why: str
    not_run: str

    def verdict(self, measured: Mapping[str, FigureValue]) -> str:
        """A clause for each way in which values were found, the best way first. "Reproduced" is a
        figure whose values are all from the hardware."""
        judged = {name: claim for name, claim in self.claims.items() if claim.judged}
        present = [name for name in judged if name in measured]
        if not judged:
            return "no verdict: the paper's text has no number"
        if not present:
            return "not run" + (f": {self.not_run}" if self.not_run else "")
        clauses = []
        differs = False
        only_hardware = all(measured[name].how == "hardware" for name in present)
        for how, words in HOWS.items():
            agree = [
                judged[name].agrees(measured[name].number)
                for name in present
                if measured[name].how == how
            ]
            if agree and all(agree) and only_hardware:
                clauses.append(words)
            elif agree:
                share = f"{sum(agree)} of {len(agree)} agree" if any(agree) else "differs"
                share = "agrees" if all(agree) else share
                clauses.append(f"{words.replace('reproduced', 'measured')}: {share}")
                differs |= not all(agree)
        if differs:
            clauses.append(self.why or "the reason is not known")
        judged_names, told = (
            {name.removesuffix(AT_LEAST) for name in names} for names in (judged, present)
        )
        missing = len(judged_names - told)
        return "; ".join(clauses) + (f" ({missing} not run)" if missing else "")


def read_figures(paper: str) -> list[Figure]:
    figures = []
    for number, entry in json.loads(CLAIMS.read_text(encoding="utf-8"))[paper].items():
        within = entry.get("within", WITHIN)
        claims = {name: Claim.read(value, within) for name, value in entry["claims"].items()}
        texts = (entry.get("why", ""), entry.get("not_run", ""))
        figures.append(Figure(number, entry["subject"], entry["source"], claims, *texts))
    return figures


# Records, one a line, in files that are only appended to.


def read_records(paths: Iterable[Path], paper: str) -> list[dict[str, Any]]:
    """Of that paper. SettingError names the line that is none."""
    records = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                valid = (
                    record["how"] in HOWS
                    and "paper" in record
                    and ("values" in record or "case" in record)
                )
            except (ValueError, KeyError, TypeError):
                valid = False
            if not valid:
                raise SettingError("--results", f"{path}, line {number} is no record of `paper`")
            if record["paper"] == paper:
                records.append(record)
    return records


def append(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def gathered(
    simulated: Mapping[str, Mapping[str, float | Sequence[float]]],
    records: Iterable[Mapping[str, Any]],
    computed: Collection[str] = (),
) -> ValuesByFigure:
    """Returns the values by figure and claim: of simulated runs (a number, or one for each seed),
    of figures `computed` by arithmetic, and of records.

    If a claim has several values, the better way counts, then a run, then the later record.
    """
    gathered_values: dict[str, dict[str, FigureValue]] = {}
    ways = list(HOWS)
    own = [
        {
            "figure": number,
            "how": "computed" if number in computed else "simulated",
            "values": values,
        }
        for number, values in simulated.items()
    ]
    for record in [*records, *own]:
        figure = gathered_values.setdefault(record["figure"], {}) if "values" in record else {}
        for name, number in record.get("values", {}).items():
            seeds = tuple(number) if isinstance(number, Sequence) else (number,)
            value = FigureValue(fmean(seeds), record["how"], seeds if len(seeds) > 1 else ())
            if name not in figure or ways.index(value.how) <= ways.index(figure[name].how):
                figure[name] = value
    return gathered_values


# What is shown.


def table(figures: Sequence[Figure], values: ValuesByFigure) -> str:
    """Markdown: a row a figure, with the paper's values and ours, then our measured values without
    a claim."""
    lines = ["| figure | subject | claim: the paper, ours | verdict |", "|---|---|---|---|"]
    for figure in figures:
        ours = values.get(figure.number, {})
        cells = [
            f"{name}: {claim.text}, {_shown(ours.get(name))}"
            for name, claim in figure.claims.items()
        ]
        cells += _unclaimed(
            {
                name: value
                for name, value in ours.items()
                if name not in figure.claims and value.measured
            }
        )
        source = f"{figure.subject} ({figure.source})"
        lines.append(
            f"| {figure.number} | {source} | {'<br>'.join(cells)} | {figure.verdict(ours)} |"
        )
    return "\n".join(lines)


def _unclaimed(values: Mapping[str, FigureValue]) -> list[str]:
    """A line for all values whose names differ only behind their last comma."""
    names_by_stem: dict[str, list[str]] = {}
    for name in values:
        names_by_stem.setdefault(name.rpartition(", ")[0] or name, []).append(name)
    lines = []
    for stem, names in names_by_stem.items():
        if len(names) == 1:
            lines.append(f"{names[0]}: {_shown(values[names[0]])}")
            continue
        cases = (
            f"{name[len(stem) :].removeprefix(', ')} {_shown(values[name])}".lstrip()
            for name in names
        )
        lines.append(f"{stem}: {'; '.join(cases)}")
    return lines


def _shown(value: FigureValue | None) -> str:
    if value is None:
        return "-"
    if value.seeds:
        return (
            f"{value.number:.3g} ({len(value.seeds)} seeds: {min(value.seeds):.3g} to "
            f"{max(value.seeds):.3g})"
        )
    return f"**{value.number:.3g}**" if value.measured else f"{value.number:.3g}"


def write_page(page: Path, text: str) -> None:
    """Between the marks of the page, which must have them. Raises SettingError."""
    before, begin, rest = (page.read_text(encoding="utf-8") if page.exists() else "").partition(
        BEGIN
    )
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SettingError("--page", f"{page} lacks a line {BEGIN} with a line {END} behind it")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def draw(figures: Sequence[Figure], values: ValuesByFigure, path: Path) -> None:
    """The figures that have numbers of the paper and of ours: bars side by side, a panel a
    figure."""
    shown = []
    for figure in figures:
        pairs = [
            (name, claim, values[figure.number][name])
            for name, claim in figure.claims.items()
            if name in values.get(figure.number, {}) and claim.text.replace(".", "").isdigit()
        ]
        if pairs:
            shown.append((figure, pairs))
    if not shown:
        raise SettingError("--plot", "no figure has been run that the paper has numbers for")
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    picture, grid = subplots(
        "--plot", rows, columns, figsize=(5 * columns, 3.4 * rows), squeeze=False
    )
    for axes in grid.flat[len(shown) :]:
        axes.axis("off")
    for axes, (figure, pairs) in zip(grid.flat, shown, strict=False):
        places = range(len(pairs))
        axes.bar(
            [x - 0.2 for x in places],
            [float(claim.text) for _, claim, _ in pairs],
            0.4,
            label="the paper",
        )
        hows = " and ".join(dict.fromkeys(value.how for *_, value in pairs))
        axes.bar(
            [x + 0.2 for x in places],
            [value.number for *_, value in pairs],
            0.4,
            label=f"ours, {hows}",
        )
        axes.set_title(f"{figure.number}: {figure.subject}", fontsize=8)
        axes.set_xticks(
            list(places), [name for name, *_ in pairs], rotation=25, ha="right", fontsize=6
        )
        axes.legend(fontsize=7)
    picture.savefig(path, dpi=80)


def today() -> str:
    return time.strftime("%Y-%m-%d")
