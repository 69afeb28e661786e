"""Timings of kernels on disk: each is there when it is made, and a kill loses nothing.

One file holds the timings of one kernel under one key, a line of JSON each; the last line about a
configuration counts. Any number of processes append at once, and nothing is locked: a line is one
write to the end of the file. It begins with the line break, so that what a killed process or a full
disk has left half written spoils no other line. The first line of a writer that finds no key in the
file is the key, and lines before a key of this schema are no one's: nothing has to be taken away
while others may be writing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.data.measurement import Measurement
from costmodel.errors import CorruptFile, InvalidInput
from costmodel.files import CACHE_VARIABLE, cache_directory, decode, read_small_file, replace_file
from costmodel.validation import one_line

if TYPE_CHECKING:
    import triton

SCHEMA = 1
"""Version of the files; those of another are no entries."""

log = logging.getLogger("costmodel")


# --- Names of configurations ----------------------------------------------------------------------


def config_name(config: triton.Config) -> str:
    """Return what makes a configuration itself, as JSON text, equal in every process.

    A value that JSON lacks, and a hook, is there by its type and a text. Of ``ir_override`` the
    content counts.

    Raises:
        InvalidInput: a value is NaN or infinite.
    """
    parts = {
        "kwargs": {name: _plain(value) for name, value in config.kwargs.items()},
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "num_ctas": config.num_ctas,
        "maxnreg": config.maxnreg,
        "ir_override": config.ir_override and _content(Path(config.ir_override)),
        "pre_hook": _plain(config.pre_hook),
    }
    return _text(parts)


def _plain(value: Any) -> Any:
    """Return a value that JSON has; others by type and a text that no address is in."""
    if isinstance(value, Enum):
        return {"type": _qualified(type(value)), "text": value.name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    kind = _qualified(type(value))
    if kind.endswith(".constexpr"):
        return _plain(value.value)
    if hasattr(value, "__name__"):  # a function or a class; Triton's functions have a hash too
        key = getattr(value, "cache_key", "")
        text = f"{_qualified(value)} {key if type(key) is str else ''}".strip()
        return {"type": kind, "text": text}
    return {"type": kind, "text": re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))}


def _qualified(named: Any) -> str:
    name = getattr(named, "__qualname__", "") or named.__name__
    return f"{getattr(named, '__module__', '')}.{name}"


def _content(path: Path) -> str:
    try:
        return f"{path.suffix} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError as error:  # Triton says so too, when it compiles
        return f"{path.suffix} unreadable: {error.strerror}"


# --- The files ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Kept:
    """Knowledge of one kernel under one key.

    Attributes:
        measured: the last timing of each configuration, by :func:`config_name`.
        chosen: the configuration that launches take; None: none was chosen yet.
        why: how it was chosen.
        when: and when: UTC, ISO 8601.
    """

    measured: dict[str, Measurement] = field(default_factory=dict)
    chosen: str | None = None
    why: str = ""
    when: str = ""


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One file of the folder."""

    path: Path
    key: Mapping[str, Any]
    kept: Kept


class KernelStore:
    """The timings in one folder. Where it cannot be written: one warning, and memory alone.

    A key is a mapping that JSON can hold: ``name`` of the kernel, ``key`` with the values that the
    tuner's key has, in its order, and all else that timings rest on, such as ``device``.

    Args:
        directory: default: ``kernels`` in :func:`cache_directory`, looked up when it is used.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._named = None if directory is None else Path(directory)
        self._unwritten: dict[str, bytes] = {}  # by file name
        self._checked: set[Path] = set()
        self._gave_up = False
        self._lock = threading.Lock()

    @property
    def path(self) -> Path | None:
        """The folder, which may not exist yet; None where there can be none."""
        try:
            return self._named or cache_directory() / "kernels"
        except InvalidInput as error:
            self._give_up(error)
            return None

    def read(self, key: Mapping[str, Any]) -> Kept:
        """Return what is known under a key; nothing if there is no such entry."""
        name, folder, kept = _file_name(key), self.path, None
        try:
            kept = _load(folder / name)[1] if folder else None
        except (OSError, CorruptFile) as error:
            log.warning("%s is ignored: %s", name, one_line(error))
        return _parse(self._unwritten.get(name, b""), name, kept)[1]

    def note(self, key: Mapping[str, Any], config_name: str, measurement: Measurement) -> None:
        """Keep a timing."""
        # NaN, which JSON lacks, is what a field has that is left out.
        figures = {name: value for name, value in asdict(measurement).items() if value == value}
        self._append(key, {"config": config_name, "measurement": figures})

    def choose(self, key: Mapping[str, Any], config_name: str, why: str) -> None:
        """Keep which configuration launches take."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        self._append(key, {"chosen": config_name, "why": why, "when": when})

    def entries(self) -> list[KernelEntry]:
        """All entries, by file name."""
        return self.survey()[0]

    def survey(self) -> tuple[list[KernelEntry], list[Path]]:
        """All entries, and the files that are none, each by file name."""
        entries, unusable = [], []
        for path in sorted(self.path.glob("*.jsonl")) if self.path else []:
            key = None
            with suppress(OSError, CorruptFile):
                key, kept = _load(path, logging.INFO)
            if key is not None:
                entries.append(KernelEntry(path, key, kept))
            elif os.path.lexists(path):  # else another process has just removed it
                unusable.append(path)
        return entries, unusable

    def clear(self, part: str = "") -> int:
        """Remove the files with ``part`` in their names; returns how many there were."""
        if (folder := self.path) is None:
            return 0
        found = [path for path in folder.glob("*.jsonl") if part in path.name]
        for path in [*found, *folder.glob(".*.jsonl.*.tmp")]:
            path.unlink(missing_ok=True)
        return len(found)

    def _append(self, key: Mapping[str, Any], record: dict[str, Any]) -> None:
        name, folder = _file_name(key), self.path
        line = _line(record)
        if folder is not None and not self._gave_up:
            try:
                self._write(folder / name, key, line)
                return
            except OSError as error:
                self._give_up(error)
        with self._lock:
            self._unwritten[name] = self._unwritten.get(name, _first_line(key)) + line

    def _write(self, path: Path, key: Mapping[str, Any], line: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        has_key = path in self._checked
        try:
            has_key = has_key or _load(path)[0] is not None
        except CorruptFile:  # a pipe, or one of any size
            replace_file(path, b"", durable=False)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not has_key or not os.fstat(file).st_size:  # it may come twice
                line = _first_line(key) + line
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(file)
        self._checked.add(path)

    def _give_up(self, error: object) -> None:
        with self._lock:
            first, self._gave_up = not self._gave_up, True
        if first:
            warnings.warn(
                f"timings of kernels cannot be kept, so they last for this process only: {error} "
                f"({CACHE_VARIABLE}=DIR names another directory)",
                RuntimeWarning,
                stacklevel=4,
            )


def _file_name(key: Mapping[str, Any]) -> str:
    """Return the file of a key; a release with other files finds none of these under its names."""
    digest = hashlib.sha256(f"{SCHEMA} {_text(key)}".encode()).hexdigest()[:20]
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", str(key.get("name", "kernel")))[-80:]
    return f"{name}-{digest}.jsonl"


def _first_line(key: Mapping[str, Any]) -> bytes:
    return _line({"schema": SCHEMA, "key": dict(key)})


def _line(record: dict[str, Any]) -> bytes:
    return f"\n{_text(record, sort_keys=False)}".encode()


def _text(value: Any, *, sort_keys: bool = True) -> str:
    """Return JSON text; for names its order does not count.

    Raises:
        InvalidInput: JSON does not have such a value.
    """
    try:
        return json.dumps(value, sort_keys=sort_keys, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{value!r:.200}: {error}: expected finite numbers and text") from None


def _load(path: Path, level: int = logging.WARNING) -> tuple[dict[str, Any] | None, Kept]:
    """Return the key of a file, and what it holds; None if it is no entry.

    Raises:
        CorruptFile: not a regular file, or far too large.
        OSError: it cannot be read.
    """
    try:
        content = read_small_file(path)
    except FileNotFoundError:
        return None, Kept()
    key, kept = _parse(content, path.name)
    if content and key is None:
        log.log(level, "%s holds no timings of this key and is ignored", path)
    return key, kept


def _parse(
    content: bytes, name: str, kept: Kept | None = None
) -> tuple[dict[str, Any] | None, Kept]:
    """Return the key in the lines of a file, and what they hold; what is no such line is skipped.

    Args:
        name: of the file, which the key must have.
        kept: what is known before; the lines are added.
    """
    key: dict[str, Any] | None = None
    kept = kept or Kept()
    for line in content.split(b"\n"):
        try:
            match json.loads(line):
                case {"schema": schema, "key": dict(found)}:
                    if schema == SCHEMA and _file_name(found) == name:
                        key = found
                case {"config": str(config), "measurement": dict(figures)} if key is not None:
                    kept.measured[config] = decode(figures, Measurement)
                case {"chosen": str(chosen), "why": str(why), "when": str(when)} if key is not None:
                    kept.chosen, kept.why, kept.when = chosen, why, when
        except (ValueError, RecursionError):  # InvalidInput is a ValueError
            continue
    return key, kept
