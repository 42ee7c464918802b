"""What the wrapper learns of a run, kept as it comes: a journal of JSON lines, then the profile's training part.

The journal is what survives a kill of the wrapper; `recover` makes a part of it afterwards.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from trimtab.account import Account, OrderRecord, RunIdentity
from trimtab.protocol import Message, Setting
from trimtab_slurm import profile
from trimtab_slurm.contents import TrainingProfile
from trimtab_slurm.directories import PARTS
from trimtab_slurm.merging import stamp

__all__ = ["OrderRecord", "Recorder", "RunIdentity", "recover"]


class Recorder:
    """Appends to the journal of one attempt; each line is in the file when the call returns.

    One thread records; any may ask for a snapshot.
    """

    def __init__(self, job_directory: Path, identity: RunIdentity) -> None:
        parts = job_directory / PARTS
        parts.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Ranks that fail at once may be started anew within a second.
        self.path = parts / f"training-{stamp(identity.start_seconds, exact=True)}.jsonl"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._file = os.fdopen(descriptor, "a", buffering=1, encoding="utf-8")
        self._account, self._lock, self._gap = Account(identity), Lock(), False
        self._write("identity", asdict(identity))

    def message(self, message: Message) -> None:
        """Keep a message of a rank."""
        body = asdict(message)
        body.pop("token", None)
        self._write(type(message).__name__, body)

    def event(self, kind: str, text: str) -> None:
        """Keep something that happened in the wrapper."""
        self._write("event", {"kind": kind, "text": text})

    def setting(self, first_step: int, setting: Setting) -> None:
        """Keep what the ranks run from a step on. What they say of a reshape is kept with their message."""
        self._write("setting", {"first_step": first_step, "setting": asdict(setting)})

    def order(self, record: OrderRecord) -> None:
        """Keep an order, or what has become of it: a record takes the place of an earlier one of the same number."""
        self._write("order", asdict(record))

    def snapshot(self) -> TrainingProfile:
        """All that is recorded until now."""
        with self._lock:
            return self._account.training()

    def finish(self, exit_code: int, outcome: str) -> Path:
        """Note the end, and turn the journal into the training part; returns the part's path.

        Raises OSError where that cannot be written: the journal stays then.
        """
        self._write("end", {"exit_code": exit_code, "outcome": outcome})
        with suppress(OSError):  # what its buffer still holds: noted already
            self._file.close()
        return _make_part(self.path, self._account)

    def _write(self, kind: str, body: dict[str, Any]) -> None:
        line = {"time_seconds": time.time(), "kind": kind, "body": body}
        with self._lock:
            self._account.take(line)
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._miss(error)

    def _miss(self, error: OSError) -> None:
        """Note, once, that the journal has a gap: a full disk must not end the training."""
        if not self._gap:
            self._gap = True
            text = f"{self.path} cannot be written ({error}): were this wrapper killed, what follows would not be known"
            body = {"kind": "recording", "text": text}
            with self._lock:
                self._account.take({"time_seconds": time.time(), "kind": "event", "body": body})


def recover(job_directory: Path) -> list[Path]:
    """Make the training part of each journal that has none yet: its wrapper was killed, or is still at work."""
    journals = sorted((job_directory / PARTS).glob("training-*.jsonl"))
    return [_make_part(journal, account) for journal in journals if (account := _account_of(_intact(journal)))]


def _make_part(journal: Path, account: Account) -> Path:
    part = journal.with_suffix(".h5")
    profile.write(part, account.profile())
    if account.ended:
        journal.unlink()
    return part


def _account_of(lines: Iterable[dict[str, Any]]) -> Account | None:
    """What a journal's lines tell; None where there is none. The first is the identity."""
    account = None
    for line in lines:
        if account is None:
            account = Account(RunIdentity(**line["body"] | {"nodes": tuple(line["body"]["nodes"])}))
        account.take(line)
    return account


def _intact(journal: Path) -> Iterator[dict[str, Any]]:
    """The lines up to the first damaged one: a kill can only have torn the last."""
    with journal.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                return
