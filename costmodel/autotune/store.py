"""Timings of kernels on disk: each is written when it is made, and a kill loses nothing.

One file holds the timings of one kernel under one key, a line of JSON each; the last line about a
configuration counts. Any number of processes append at once, and nothing is locked: a line is one
write to the end of the file. A line begins with the line break, so that a line that a killed
process or a full disk left half written spoils no other line. The first line of each writer is the
key. Lines before a key that fits the file's name are ignored, so nothing has to be removed while
others may be writing.
"""

import errno
import json
import logging
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from costmodel.data.measurement import Measurement
from costmodel.errors import CorruptFile, InvalidInput
from costmodel.files import Named, decode, digest, make_folder, read_small_file, time_now
from costmodel.tuning.cache import CacheFolder, file_stem
from costmodel.validation import log, one_line

SCHEMA = 1
"""Version of the files; it is in the hash of their names, so other versions have other names."""

_RELATIVES = 32

_PARTS = "kwargs num_warps num_stages num_ctas maxnreg ir_override pre_hook"


# --- Names of configurations ----------------------------------------------------------------------


def config_name(config: Any) -> str:
    """Return the fields of a ``triton.Config`` as JSON text, equal in every process.

    A hook, or a value that JSON lacks, is given by its type and a text; ``ir_override`` by a hash
    of the file's content.

    Raises:
        InvalidInput: a value is NaN or infinite.
    """
    parts = {name: _plain(getattr(config, name)) for name in _PARTS.split()}
    if config.ir_override:
        parts["ir_override"] = _content(Path(config.ir_override))
    return _text(parts)


def is_config(name: str) -> bool:
    """Return True if a text may be the name of a configuration."""
    with suppress(ValueError):
        match json.loads(name):
            case {"kwargs": dict(), **options}:
                return options.keys() >= {*_PARTS.split()[1:5]}
    return False


def _plain(value: Any) -> Any:
    """Return a value that JSON has; any other as its type and a text without addresses."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    kind = type(value)
    return {"type": f"{kind.__module__}.{kind.__qualname__}", "text": lasting_text(value)}


def lasting_text(value: Any) -> str:
    """Return a text of a value that is the same in every process: without addresses."""
    text = f"{value} {getattr(value, 'cache_key', '')}".strip()  # Triton's functions have a hash
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _content(path: Path) -> dict[str, str]:
    try:
        text = digest(path.read_bytes(), 64)
    except OSError as error:  # Triton reports it too, when it compiles
        text = f"unreadable: {error.strerror}"
    return {"type": path.suffix, "text": text}


# --- The files ------------------------------------------------------------------------------------


@dataclass
class KernelEntry:
    """The content of one file: one kernel under one key.

    Attributes:
        key: the whole key; empty: the file is no entry.
        arguments: of the call that was timed: types and shapes of tensors, and numbers.
        measured: the last timing of each configuration, by :func:`config_name`.
        binaries: facts about the binary of each, such as registers and counts of its PTX.
        chosen: the configuration that launches take; None: none was chosen yet.
        untried: configurations that were not tried for the choice: no gain was expected.
        why: the reason for the choice.
        when: the time of the choice: UTC, ISO 8601.
        unsteady: timings scattered at the choice, so the next process compares once more.
    """

    path: Path
    key: Named = field(default_factory=dict)
    arguments: Named = field(default_factory=dict)
    measured: dict[str, Measurement] = field(default_factory=dict)
    binaries: dict[str, Named] = field(default_factory=dict)
    chosen: str | None = None
    untried: list[str] = field(default_factory=list)
    why: str = ""
    when: str = ""
    unsteady: bool = False

    def choice(self, names: Collection[str]) -> str | None:
        """Return the final choice among these configurations; None if there is none."""
        if self.unsteady or not set(names) <= {*self.measured, *self.untried}:
            return None
        return next((x for x in names if x == self.chosen and self.measured[x].ok), None)

    def known(self, names: Collection[str]) -> dict[str, Measurement]:
        """Return the outcomes of those of these configurations that need not be tried again.

        If none works, only crashes and timeouts are returned: the others may work with other
        arguments that have the same key.
        """
        found = {name: m for name, m in self.measured.items() if name in names and not m.no_room}
        if any(m.ok for m in found.values()):
            return found
        return {name: m for name, m in found.items() if m.status in ("crashed", "timeout")}

    def add(self, content: bytes) -> None:
        """Add the lines of a file; lines that do not belong to this key are skipped."""
        for line in content.split(b"\n"):
            try:
                record = json.loads(line)
                match record:
                    case {"schema": _, "key": dict(key)}:
                        if _file_name(record) == self.path.name:
                            self.key = key
                    case _ if not self.key:
                        continue
                    case {"config": str(config), "measurement": dict(figures)}:
                        self.measured[config] = decode(figures, Measurement)
                    case {"config": str(config), "binary": dict(binary)}:
                        self.binaries[config] = binary
                    case {"arguments": dict(arguments)}:
                        self.arguments = arguments
                    case {"chosen": str(chosen), "why": str(why), "when": str(when), **more}:
                        self.chosen, self.why, self.when = chosen, why, when
                        self.unsteady = more.get("unsteady") is True
                        untried = more.get("untried")
                        self.untried = [*map(str, untried)] if isinstance(untried, list) else []
            except (ValueError, RecursionError):  # InvalidInput is a ValueError
                continue


class KernelStore(CacheFolder):
    """The timings in one folder. If it cannot be written, it warns once and keeps them in memory.

    A key is a mapping that JSON can hold: ``name`` of the kernel, ``key`` with the values of the
    tuner's key in its order, and everything else that timings depend on, such as ``device``.

    Args:
        directory: default: ``kernels`` in the cache folder, looked up when it is used.
    """

    def __init__(self, directory: str | Path | None = None):
        super().__init__(directory, "kernels")
        self._unwritten: dict[str, bytes] = {}  # by file name
        self._begun: set[Path] = set()

    def read(self, key: Named) -> KernelEntry:
        """Return the entry of a key; an empty one if there is none."""
        name, folder = _file_name(_header(key)), self.path
        entry = _load(folder / name, logging.WARNING) if folder else KernelEntry(Path(name))
        entry.add(self._unwritten.get(name, b""))
        return entry

    def note(self, key: Named, config_name: str, measurement: Measurement) -> None:
        """Keep a timing."""
        # JSON lacks NaN, so fields that are NaN are left out; it is their default.
        figures = {name: value for name, value in asdict(measurement).items() if value == value}
        self._append(key, {"config": config_name, "measurement": figures})

    def describe(self, key: Named, arguments: Named) -> None:
        """Keep the arguments of the call."""
        self._append(key, {"arguments": arguments})

    def note_binary(self, key: Named, config_name: str, **binary: Any) -> None:
        """Keep facts about the binary of a configuration."""
        self._append(key, {"config": config_name, "binary": binary})

    def choose(
        self,
        key: Named,
        config_name: str,
        why: str,
        untried: Sequence[str] = (),
        *,
        unsteady: bool = False,
    ) -> None:
        """Keep the configuration that launches take, and the names of those not tried."""
        more = {"untried": [*untried], "unsteady": unsteady}
        record = {"chosen": config_name, "why": why, "when": time_now()}
        self._append(key, record | {name: value for name, value in more.items() if value})

    def relatives(self, key: Named) -> list[KernelEntry]:
        """Return entries of a few other keys: same kernel, device and Triton, of 32 files."""
        name = _file_name(_header(key))
        paths = self.files(f"{name.rpartition('-')[0]}-*.jsonl")  # without the hash
        newest = sorted(paths, key=_changed, reverse=True)[:_RELATIVES]
        found = [_load(path, logging.INFO) for path in newest if path.name != name]
        parts = "name", "source", "device", "triton"
        return [e for e in found if all(e.key.get(part) == key.get(part) for part in parts)]

    def entries(self) -> list[KernelEntry]:
        """All entries, by file name."""
        return self.survey()[0]

    def survey(self) -> tuple[list[KernelEntry], list[Path]]:
        """All entries, and the files that are no entries, each by file name."""
        read = [_load(path, logging.INFO) for path in self.files("*.jsonl")]
        # Another process may have removed a file meanwhile.
        unusable = [entry.path for entry in read if not entry.key and os.path.lexists(entry.path)]
        return [entry for entry in read if entry.key], unusable

    def named(self, name: str) -> list[Path]:
        """Return the files of the kernel of this name; if none is, those with it in their names."""
        found = [path for path in self.files("*.jsonl") if name in path.name]
        return [path for path in found if f".{name}-" in f".{path.name}"] or found

    def clear(self, part: str = "") -> int:
        """Remove the files that :meth:`named` returns; return how many there were."""
        found = self.named(part)
        for path in found:
            path.unlink(missing_ok=True)
        return len(found)

    def _append(self, key: Named, record: Named) -> None:
        header = _header(key)
        name, first, line = _file_name(header), _line(header), _line(record)
        if (folder := self.path) and not self._gave_up:
            try:
                self._write(folder / name, first, line)
                return
            except OSError as error:
                self._give_up(error)
        with self._lock:
            self._unwritten[name] = self._unwritten.get(name, first) + line

    def _write(self, path: Path, first: bytes, line: bytes) -> None:
        make_folder(path.parent)
        with open(path, "ab", buffering=0) as file:
            # An empty file: another process has removed the one that this process began.
            if path not in self._begun or not file.tell():
                line = first + line
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, "No space left on the disk")
        self._begun.add(path)


def _changed(path: Path) -> float:
    """Return the time of a file's last change; 0 if another process has removed it."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _header(key: Named) -> Named:
    return {"schema": SCHEMA, "key": key}


def _file_name(header: Named) -> str:
    return f"{file_stem(str(header['key'].get('name', 'kernel')), _text(header))}.jsonl"


def _line(record: Named) -> bytes:
    return f"\n{_text(record, sort_keys=False)}".encode()


def _text(value: Any, *, sort_keys: bool = True) -> str:
    """Return JSON text; with sorted keys, so that a name does not depend on their order.

    Raises:
        InvalidInput: JSON does not have such a value.
    """
    try:
        return json.dumps(value, sort_keys=sort_keys, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{value!r:.200}: {error}: expected finite numbers and text") from None


def _load(path: Path, level: int) -> KernelEntry:
    """Read a file; if it cannot be read, or is no entry, the key is empty."""
    entry = KernelEntry(path)
    try:
        content = read_small_file(path)
        entry.add(content)
        if content and not entry.key:
            log.log(level, "%s holds no timings of this key and is ignored", path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, CorruptFile) as error:
        log.log(level, "%s is ignored: %s", path, one_line(error))
    return entry
