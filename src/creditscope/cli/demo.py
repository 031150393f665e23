"""``creditscope demo``: the whole story on data that ships with the package."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from creditscope.cli.command import Command, Exit, columns, flag, say, say_json


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train BP, FA and DFA with their baselines on the digits that ship with the package, 3 seeds each; audit; report.

    A run that is there already is neither trained nor audited again. Each run's folder has its audit.html. The last
    line is the path of the report. A flag is a finding and no failure: the exit code stays 0.
    """

    out: str = flag("runs/demo", value="DIR")
    """Where the runs, the figures and the report go."""

    def run(self) -> Exit:
        """Train, and print the table and where the report is."""
        from creditscope.cli.story import tell

        story = tell(Path(self.out), " ".join(["creditscope demo", *self.arguments()]))
        if self.json:
            found = {"report": str(story.report), "table": asdict(story.table), "diverged": story.diverged}
            say_json(found | {"verdicts": story.verdicts})
        else:
            say(columns([story.table.heading, *story.table.rows]))
            say(story.table.note)
            for run in story.diverged:
                say(f"diverged: {run}")
            say(str(story.report))
        return Exit.DIVERGED if story.diverged else Exit.DONE
