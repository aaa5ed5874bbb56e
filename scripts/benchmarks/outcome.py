"""What a benchmark found: figures against their limits, tables for the page, and whether the run means anything."""

import dataclasses
import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """A figure and the most it may be."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


@dataclass
class Outcome:
    """The result of one benchmark."""

    name: str
    targets: list[Target]
    tables: list[list[list[str]]] = field(default_factory=list)
    """Each a list of rows, the head first."""
    control: float | None = None
    """A/A ratio that is furthest from 1; None where nothing was timed against a copy of itself."""
    conclusive: bool = True
    notes: list[str] = field(default_factory=list)
    series: dict = field(default_factory=dict)
    """Numbers for the picture."""
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    quick: bool = False

    @property
    def verdict(self) -> str:
        if not self.conclusive:
            return "INCONCLUSIVE"
        return "holds" if all(target.holds for target in self.targets) else "MISSED"

    def text(self) -> str:
        """The tables, the targets and the verdict, and the one figure that counts in a line of its own at the end."""
        lines = [line for table in self.tables for line in [*markdown(table), ""]] + self.notes
        for target in self.targets:
            word = "holds" if target.holds else "MISSED"
            lines.append(f"{target.name}: {target.value:.4g}, at most {target.limit:g}: {word}")
        if self.control is not None:
            lines.append(f"A/A control: {self.control:.3f}")
        return "\n".join([*lines, f"{self.name}: {self.verdict}", f"{self.targets[0].value:.4g}"])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(dataclasses.asdict(self), indent=1))


def load(path: Path) -> Outcome:
    """An outcome that was saved."""
    values = json.loads(path.read_text())
    return Outcome(**values | {"targets": [Target(**target) for target in values["targets"]]})


def markdown(table: list[list[str]]) -> list[str]:
    """The lines of a Markdown table."""
    head, *rows = [[str(cell) for cell in row] for row in table]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
