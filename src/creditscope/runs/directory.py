"""A run on disk.

========================  ==============================================================================================
``options.json``          what the run was started with; written once. A folder with this file is a run
``environment.json``      versions, machine, device, threads it was started on; written once
``status.json``           how far it has come
``history.nc``            the history by epoch
``audit.nc``              the audit of the trained learner, with a format version and a question of its own: one that is
                          older, or answers another question, is made again (``audit.md`` and ``audit.html`` show it)
``monitor.jsonl``         the quick audits along the training, where there was a monitor
``baselines/``            the matched baselines, where they were trained: a run each
``checkpoints/``          ``TAG.safetensors``: tensors and JSON in one file
``log.txt``               what happened when
``lock``                  only while a process works on the run: which one
========================  ==============================================================================================

Each file is whole at any moment, and after a finished run the same files are there however often it was killed.
Nothing here loads torch but the checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from creditscope.errors import MissingError, UsageError, unknown
from creditscope.runs import files, history, lock, options

if TYPE_CHECKING:
    import xarray
    from torch import Tensor

State = Literal["new", "running", "interrupted", "finished", "diverged", "failed"]
STATES: tuple[State, ...] = get_args(State)

_FORMAT = "creditscope.run"
_VERSION = 1
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Status:
    """How far a run has come. A run that says "running" while no process holds it was killed: "interrupted"."""

    state: State = "new"
    epoch: int = 0
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do."""
        return self.state in ("finished", "diverged")


class RunDirectory:
    """A run on disk: claimed by one process for writing (:meth:`claim`), or opened to look at (:meth:`open`)."""

    def __init__(self, path: Path, claimed: lock.Lock | None = None):
        self.path = path
        self._lock = claimed
        self._unwritten_lines = 0

    # --- opening ------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open a run to look at it; who works on it does not notice."""
        run = cls(Path(path))
        with files.one_line(run.path, "read"):
            if not run.path.exists():
                raise MissingError(f"not found: {path}")
            if not _is_run(run.path):
                raise UsageError(f"{path} is not a run: it holds no options.json")
        run._header()  # refuses a corrupt or newer one
        return run

    @classmethod
    @contextmanager
    def claim(
        cls, path: str | Path, options: dict[str, Any], environment: dict[str, Any] | None = None
    ) -> Iterator[RunDirectory]:
        """Make a run, or take up the one that is there, for this process alone.

        Another process has it: :class:`RunBusyError`. It was started with other options: :class:`OptionsDifferError`.
        What a killed process has left half-done is removed, and a run that it left "running" becomes "interrupted". The
        environment of the start is kept; where a later one differs, the log says in what. A run that has ended is only
        looked at: not a file of it changes.
        """
        path = Path(path)
        made = _make_folder(path)
        try:
            run = cls(path, lock.Lock(path / "lock"))
            try:
                run._settle(options, environment)
                yield run
            finally:
                run._release()
        finally:
            if made:
                _remove_empty(path)

    def _settle(self, given: dict[str, Any], environment: dict[str, Any] | None) -> None:
        files.sweep(self.path)
        files.sweep(self._checkpoints)
        if _is_run(self.path):
            self._compare(options.as_json(given))
        else:
            header = {"format": _FORMAT, "version": _VERSION, "options": given}
            files.write_json(self.path / "options.json", header)
        status = self._stored_status()
        if status.state == "running":
            self.write_status("interrupted", epoch=status.epoch, **status.detail)
        if environment is not None and not status.ended:
            self._record(environment)

    def _compare(self, given: dict[str, Any]) -> None:
        found = list(options.differences(self.options, given))
        if found:
            raise options.OptionsDifferError(f"{self.path} was started with other options: {options.listed(found)}")

    def _record(self, environment: dict[str, Any]) -> None:
        there = self.environment
        if there is None:
            files.write_json(self.path / "environment.json", environment)
            return
        found = list(options.differences(there, options.as_json(environment)))
        if found:
            self.log(f"goes on in another environment: {options.listed(found)}")

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def _is_ours(self) -> bool:
        return self._lock is not None and self._lock.held

    def _require_claim(self) -> None:
        if not self._is_ours:
            raise UsageError(f"{self.path} is open for looking only: claim it to write")

    # --- what it was started with -------------------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """What the run was started with, as JSON gives it back."""
        return self._header()["options"]

    def _header(self) -> dict[str, Any]:
        path = self.path / "options.json"
        header = files.read_json(path)
        if header is None:
            raise MissingError(f"not found: {path}")
        found, version = header.get("format"), header.get("version")
        files.check_format(path, found=found, version=version, ours=_FORMAT, latest=_VERSION)
        if not isinstance(header.get("options"), dict):
            raise UsageError(f"{path} is corrupt: it holds no options")
        return header

    @property
    def environment(self) -> dict[str, Any] | None:
        """What the run was started on; None where that was not recorded."""
        return files.read_json(self.path / "environment.json")

    # --- how far it has come ------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """How far the run has come."""
        status = self._stored_status()
        if status.state == "running" and not self._is_ours and self.holder is None:
            return Status("interrupted", status.epoch, status.detail)
        return status

    @property
    def holder(self) -> lock.Holder | None:
        """The process that works on the run; None where none does."""
        return lock.holder(self.path / "lock")

    def _stored_status(self) -> Status:
        path = self.path / "status.json"
        stored = files.read_json(path)
        if stored is None:
            return Status()
        state, epoch, detail = (stored.get(name) for name in ("state", "epoch", "detail"))
        if state not in STATES or not isinstance(epoch, int) or not isinstance(detail, dict):
            raise UsageError(f"{path} is corrupt: it holds no status")
        return Status(state, epoch, detail)

    def write_status(self, state: State, *, epoch: int, **detail: Any) -> None:
        """Say how far the run has come; ``detail`` is anything that JSON takes."""
        self._require_claim()
        if state not in STATES:
            raise unknown("state", state, STATES)
        stored = {"state": state, "epoch": epoch, "detail": detail, "time": _now()}
        files.write_json(self.path / "status.json", stored)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _checkpoint(self, tag: str) -> Path:
        if not _TAG.fullmatch(tag):
            raise UsageError(f"'{tag}' is no tag of a checkpoint: letters, digits, '.', '_' and '-', e.g. epoch-0005")
        return self._checkpoints / f"{tag}.safetensors"

    def save_checkpoint(self, tag: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Keep tensors, and anything that JSON takes, under a tag; in place of what it named before, in one step."""
        from creditscope.runs import checkpoint

        self._require_claim()
        path = self._checkpoint(tag)
        with files.one_line(self._checkpoints):
            self._checkpoints.mkdir(exist_ok=True)
        checkpoint.save(path, tensors, meta)

    def load_checkpoint(self, tag: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the tensors, on the CPU, and the JSON under a tag, verified; None where there is none."""
        from creditscope.runs import checkpoint

        return checkpoint.load(self._checkpoint(tag))

    def checkpoints(self) -> list[str]:
        """Return the tags that are there, sorted."""
        return sorted(path.stem for path in self._checkpoints.glob("*.safetensors"))

    def delete_checkpoint(self, tag: str) -> None:
        """Remove what is under a tag; nothing happens where there is nothing."""
        self._require_claim()
        path = self._checkpoint(tag)
        with files.one_line(path, "removed"):
            path.unlink(missing_ok=True)

    # --- history and log ----------------------------------------------------------------------------------------------

    def write_history(self, dataset: xarray.Dataset) -> None:
        """Keep the history, in place of the one before, in one step."""
        self._require_claim()
        history.save(self.path / "history.nc", dataset)

    def history(self) -> xarray.Dataset | None:
        """Return the history, held in memory; None where there is none."""
        return history.load(self.path / "history.nc")

    def log(self, line: str) -> None:
        """Append a line with the time (UTC) to the log.

        A log that cannot be written, on a full disk say, stops no training; the next line that can be says how many
        are missing before it.
        """
        self._require_claim()
        missing = f" ({self._unwritten_lines} lines before this could not be written)" if self._unwritten_lines else ""
        try:
            with (self.path / "log.txt").open("a", encoding="utf-8") as file:
                file.write(f"{_now()} {line}{missing}\n")
        except OSError:
            self._unwritten_lines += 1
        else:
            self._unwritten_lines = 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_run(path: Path) -> bool:
    return (path / "options.json").is_file()


def _make_folder(path: Path) -> bool:
    """Make the folder of a run and say whether it is new; refuse one that holds something else."""
    with files.one_line(path, "made"):
        for folder in (path, *path.parents):
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"{folder} is a file where a folder should be")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            _refuse_foreign(path)
            return False
    return True


def _refuse_foreign(path: Path) -> None:
    """Refuse a folder with something in it that is no run; a claim that was killed at its start leaves no more."""
    leftovers = {"lock", files.temporary(path / "options.json").name}
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in leftovers)
    if others and not _is_run(path):
        raise UsageError(f"{path} is no run and not empty (it holds {others[0]}): choose another folder")


def _remove_empty(path: Path) -> None:
    """Remove the folder of a run that could not even be begun."""
    with suppress(OSError):  # it holds a run, or its disk is gone
        path.rmdir()
