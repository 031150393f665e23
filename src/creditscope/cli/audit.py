"""``creditscope audit``: the audit and the verdict of a run, of all runs of a study, or of foreign weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from creditscope.cli.command import Command, Exit, argument, complain, flag, say, say_json
from creditscope.errors import MissingError, UsageError

if TYPE_CHECKING:
    from creditscope.auditing.result import Audit as AuditResult
    from creditscope.auditing.subject import Convention
    from creditscope.cli.audited import Subject

SEVERITY = {"passed": Exit.DONE, "flagged": Exit.FLAGGED, "cannot judge": Exit.UNJUDGED}
FOREIGN = ("weights", "blocks", "credits", "data", "head", "convention", "out")
"""The flags that make sense without a run alone."""


@dataclass(frozen=True, kw_only=True)
class Audit(Command):
    """Measure what was learned, layer by layer, and say whether the measurement can be believed.

    RUN|STUDY is the folder of a run, a folder of runs, or the name of one under ./runs. Network, rule, data and weights
    come from the run; a study's runs of the same options but for the seed give the accuracies, and the baselines are
    looked for among its runs and in each run's baselines/. audit.nc, audit.md and audit.html are written into the run.

    Foreign work is given by --module, --weights, --blocks, --credits and --data. Weights are data: no code in them is
    run. The function of --credits takes the network and gives the callable (x, y) -> [a_0 .. a_L].

    Exit code: 0 passed, 3 flagged, 4 could not judge; of several the worst.
    """

    run_or_study: str | None = argument("RUN|STUDY", None)
    """A run's folder, a folder of runs, or a name under ./runs."""
    tier: Literal["quick", "standard", "full"] = flag("standard", value="quick|standard|full")
    """How much is measured."""
    n: int = 1024
    """Test examples, the first of them."""
    probe: Literal["float64", "published"] = flag("float64", value="float64|published")
    """How loss changes are probed."""
    epoch: int | Literal["last"] = flag("last", value="N|last")
    """The epoch, if its checkpoint was kept."""
    thresholds: str | None = flag(None, value="FILE")
    """A TOML file of thresholds."""
    protocol: Literal["april", "released"] | None = flag(None, value="april|released")
    """Say also what the source study's protocol, in this version, says of the same numbers."""
    again: bool = False
    """Audit anew, also where an audit of this version is there."""
    module: str | None = flag(None, value="FILE:FUNCTION")
    """What makes the network: package.file:function or path/file.py:function."""
    weights: str | None = flag(None, value="FILE")
    """Its weights: safetensors, or a state dict of torch.save."""
    blocks: str | None = flag(None, value="'layers.*'")
    """Its blocks: names or patterns of modules, with commas, in order."""
    head: str | None = None
    """The module that h_L enters, where that cannot be told."""
    credits: str | None = flag(None, value="FILE:FUNCTION")
    """What gives the credit."""
    data: str | None = flag(None, value="NAME|FILE")
    """The data: a name, or a file (npz, safetensors) with x and y."""
    convention: tuple[str, ...] = flag((), value="mean,-1")
    """How the credit is stated, where it is not of the summed loss and along the gradient."""
    out: str | None = flag(None, value="DIR")
    """Where audit.nc, audit.md and audit.html of foreign work go (default: nowhere)."""

    def run(self) -> Exit:
        """Audit what is asked for, and print what was found."""
        if self.n < 1:
            raise UsageError(f"--n must be at least 1, not {self.n}")
        found = self._of_runs(self.run_or_study) if self.run_or_study is not None else self._of_foreign()
        if self.json:
            say_json({"audits": [self._as_json(name, audit, path) for name, audit, path in found]})
        else:
            for name, audit, path in found:
                self._print(name, audit, path)
        return max((SEVERITY[audit.verdict.status] for _, audit, _ in found), default=Exit.DONE)

    # --- of runs -------------------------------------------------------------------------------------------------

    def _of_runs(self, given: str) -> list[tuple[str, AuditResult, Path | None]]:
        from creditscope.cli.audited import subjects

        for name in FOREIGN:
            if getattr(self, name):
                raise UsageError(f"--{name} is for foreign work: a run knows its own")
        todo, waiting = subjects(find_runs(given))
        for run in waiting:
            complain(f"creditscope: {run.path} is {run.status.state} and left out")
        audits: list[tuple[str, AuditResult, Path | None]] = []
        for subject in todo:
            if len(todo) > 1:
                complain(f"{len(audits) + 1}/{len(todo)} {subject.run.path}")
            audits.append((str(subject.run.path), self._of_run(subject), subject.run.path))
        return audits

    def _of_run(self, subject: Subject) -> AuditResult:
        from creditscope.auditing.trained import Scope
        from creditscope.cli.audited import audit_run
        from creditscope.cli.foreign import make_network

        scope = Scope(tier=self.tier, probe=self.probe, n=self.n, epoch=self.epoch)
        module = self.module
        make = None if module is None else lambda: make_network(module)
        return audit_run(subject, scope, thresholds=self.thresholds, again=self.again, make=make)

    # --- of foreign work -----------------------------------------------------------------------------------------

    def _of_foreign(self) -> list[tuple[str, AuditResult, Path | None]]:
        from creditscope.auditing.run import audit
        from creditscope.cli import foreign
        from creditscope.cli.audited import write

        missing = [f"--{name}" for name in ("module", "credits", "data") if getattr(self, name) is None]
        if missing:
            if len(missing) == 3:
                raise UsageError(
                    "say what to audit: a run, a study, or foreign work with --module (see `creditscope audit --help`)"
                )
            raise UsageError(f"{' and '.join(missing)} must be given too, for foreign work")
        assert self.module is not None
        assert self.credits is not None
        assert self.data is not None
        network = foreign.make_network(self.module)
        if self.weights is not None:
            foreign.load_weights(network, Path(self.weights))
        x, y = foreign.load_examples(self.data, self.n, network)
        name = self.credits.rpartition(":")[2]
        found = audit(
            network,
            x,
            y,
            credits={name: foreign.make_credits(self.credits, network)},
            blocks=None if self.blocks is None else foreign.match_blocks(network, self.blocks),
            head=self.head,
            tier=self.tier,
            probe=self.probe,
            thresholds=self.thresholds,
            convention=read_convention(self.convention),
        )
        path = None if self.out is None else Path(self.out)
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            write(found, path)
        return [(name, found, path)]

    # --- shown ---------------------------------------------------------------------------------------------------

    def _print(self, name: str, audit: AuditResult, path: Path | None) -> None:
        from rich.console import Console

        say(name)
        console = Console(width=None if Console().width >= 100 else 100, highlight=False)
        console.print(audit.table())
        if self.protocol is not None:
            for credit in audit.verdicts:
                say(str(audit.judge(_protocol(self.protocol), credit)))
        say(f"{audit.verdict.status}: {path / 'audit.html'}" if path is not None else audit.verdict.status)

    def _as_json(self, name: str, audit: AuditResult, path: Path | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": name,
            "status": audit.verdict.status,
            "path": None if path is None else str(path / "audit.nc"),
            "verdicts": {credit: _verdict(verdict) for credit, verdict in audit.verdicts.items()},
        }
        if self.protocol is not None:
            judged = {credit: audit.judge(_protocol(self.protocol), credit) for credit in audit.verdicts}
            found["protocol"] = {credit: {"name": j.protocol, "verdict": j.verdict} for credit, j in judged.items()}
        return found


def _verdict(verdict: Any) -> dict[str, Any]:
    return {
        "status": verdict.status,
        "flags": {key: verdict.reasons[key] for key in verdict.flags},
        "unmeasured": dict(verdict.unmeasured),
        "hints": [*verdict.hints],
    }


def _protocol(name: str) -> Any:
    from creditscope.auditing import protocols

    return getattr(protocols, name)


def read_convention(given: tuple[str, ...]) -> Convention | None:
    """Return the convention that ``mean,-1`` says: reduction and sign, in any order, each with its default."""
    from creditscope.auditing.subject import Convention

    if not given:
        return None
    signs: Mapping[str, Literal[1, -1]] = {"1": 1, "+1": 1, "-1": -1}
    options: dict[str, Any] = {}
    for item in given:
        name = "sign" if item in signs else "reduction"
        if name in options:
            raise UsageError(f"--convention has two values for the {name}: {','.join(given)}")
        options[name] = signs.get(item, item)
    return Convention(**options)


def find_runs(given: str) -> list[Path]:
    """Return the folders of the runs that are meant: one run, all of a study, or those of a name under ./runs."""
    for place in (Path(given), Path("runs", given)):
        if (place / "options.json").is_file():
            return [place]
        found = sorted(path.parent for path in place.glob("*/options.json")) if place.is_dir() else []
        if found:
            return found
        if place.is_dir():
            raise UsageError(f"{place} is no run, and no folder of runs: there is no options.json in it or below")
        if place.exists():
            raise UsageError(f"{place} is a file: a run is a folder")
    raise MissingError(f"not found: {given}, nor {Path('runs', given)}")
