"""``costmodel cache``: the winners that tuning has kept on disk."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Exit, Typer

from costmodel.cli.common import AsJson, Yes, answer, confirm
from costmodel.errors import FileError, InvalidInput
from costmodel.files import CACHE_VARIABLE, Named, cache_directory, file_errors

if TYPE_CHECKING:
    from costmodel.tuning.winner_cache import WinnerCache

_MOST_NAMES = 20
_COLUMNS = "entry workload device chosen us model mode"

app = Typer(help="The winners that tuning has kept on disk; without a command they are listed.")


@app.command("list")
def list_winners(as_json: AsJson = False) -> None:
    """List the winners."""
    winners = _cache()
    entries = winners.entries()
    rows = [
        [e.path.stem, str(r.workload), r.target.device.name, str(r.chosen), r.latency_us,
         r.model, r.mode]
        for e in entries
        for r in (e.result,)
    ]  # fmt: skip
    answer(
        as_json,
        {"path": str(winners.path), "entries": [_plain(e) for e in entries]},
        (f"{len(entries)} winners in {winners.path}",
         _COLUMNS.split(), rows),
    )  # fmt: skip


def list_by_default(group: Typer, list_: Callable[[bool], None]) -> None:
    """Make a group of commands list if no command is named, and take ``--json`` before one."""

    @group.callback(invoke_without_command=True)
    def callback(context: Context, as_json: AsJson = False) -> None:
        if context.invoked_subcommand is None:
            list_(as_json)
        elif as_json:  # given before the command, it holds for the command too
            context.default_map = {context.invoked_subcommand: {"as_json": True}}


list_by_default(app, list_winners)


@app.command()
def show(
    name: Annotated[str, Argument(help="A part of the entry's file name, as `list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Show one winner: what it rests on, what was timed, and why it was chosen."""
    found = [e for e in _cache().entries() if name in e.path.stem]
    check_only_one(name, [e.path.stem for e in found], "entries", "cache")
    (entry,) = found
    result = entry.result
    about = {"chosen": result.chosen, "why": result.why, "source": result.source, **entry.key}
    rows = [[part, str(value)] for part, value in about.items()]
    timed = [[str(c), m.latency_us if m.ok else None, m.status] for c, m in result.measured]
    answer(
        as_json,
        _plain(entry),
        (str(entry.path), ["", "value"], rows),
        ("timed", ["config", "us", "status"], timed),
    )


@app.command()
def verify(as_json: AsJson = False) -> None:
    """Read every entry, count those usable here; exit code 1 if a file is no entry."""
    winners = _cache()
    entries, unusable = winners.survey()
    counts = Counter(_state(entry.key, entry.result.target.device.arch) for entry in entries)
    tell_unusable(as_json, winners.path, counts, unusable)


def tell_unusable(
    as_json: bool, folder: Path | None, counts: Mapping[str, int], unusable: Sequence[Path]
) -> None:
    """Count the files of a folder, name those that are no entries, and exit: 1 if there are any."""
    names = [path.name for path in unusable[:_MOST_NAMES]]
    more = f" and {len(unusable) - len(names)} more" if len(unusable) > len(names) else ""
    answer(
        as_json,
        {"path": str(folder), "unusable": len(unusable), "unusable_files": names, **counts},
        (str(folder), ["files", "count"],
         [*counts.items(), ("no entry, and ignored", len(unusable))]),
        notes=[f"not readable: {', '.join(names)}{more}: delete them"] if unusable else [],
    )  # fmt: skip
    raise Exit(1 if unusable else 0)


@app.command()
def clear(
    name: Annotated[str, Argument(help="Only entries with this in the file's name.")] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Forget all winners, or some; asks before it forgets all."""
    winners = _cache()
    confirm(f"all winners in {winners.path}", yes or name)
    removed, others = winners.clear(name)
    check_removed(name, removed + others, "cache")
    more = f", and {others} files that were no entries" if others else ""
    answer(
        as_json,
        {"path": str(winners.path), "removed": removed, "unusable": others},
        notes=[f"{removed} winners removed from {winners.path}{more}"],
    )


def check_removed(name: str, removed: int, group: str) -> None:
    """Raise InvalidInput if no file with this part of a name was found and removed."""
    if name and not removed:
        check_only_one(name, [], "files", group)


def check_only_one(name: str, found: Sequence[str], what: str, group: str) -> None:
    """Raise InvalidInput unless a part of a name fits exactly one thing in the list of a group."""
    if len(found) != 1:
        raise InvalidInput(
            f"{name!r} fits {len(found)} {what} ({', '.join(found[:5]) or 'none'}): expected 1; "
            f"`costmodel {group} list` shows them"
        )


def check_folder(path: Path) -> Path:
    """Return the path of a folder of the cache, which need not exist yet.

    Raises:
        FileError: it is no folder, or cannot be read.
    """
    if os.path.lexists(path):
        if not path.is_dir():
            raise FileError(
                f"{path}: expected the folder of winners; {CACHE_VARIABLE}=DIR names another"
            )
        with file_errors(path):
            os.scandir(path).close()  # a later listing would find nothing, and not say why
    return path


def _cache() -> WinnerCache:
    from costmodel.tuning.winner_cache import WinnerCache

    return WinnerCache(check_folder(cache_directory()))


def _state(key: Any, arch: int) -> str:
    """Say if an entry of this key can still answer here, as far as is known without a GPU."""
    from costmodel.gemm.space import grid_hash
    from costmodel.gemm.specialize import kernel_hashes
    from costmodel.hardware.installed import driver_version, triton_build
    from costmodel.hardware.target import Toolchain

    here = {
        "kernels": kernel_hashes(), "space": grid_hash(), **asdict(Toolchain.current(arch)),
        "triton_build": triton_build(), "driver": driver_version() or key.get("driver"),
    }  # fmt: skip
    others = {"kernels": "other kernels", "space": "another space", "driver": "another driver"}
    for name, value in here.items():
        if key.get(name) != value:
            return f"of {others.get(name, 'another toolchain')}"
    return "of these kernels and this toolchain"


def _plain(entry: Any) -> Named:
    return {"path": str(entry.path), "key": entry.key, "result": entry.result.to_dict()}
