"""``costmodel cache``: the winners that tuning has kept on disk."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli import output
from costmodel.cli.options import AsJson
from costmodel.errors import FileError, InvalidInput
from costmodel.files import CACHE_VARIABLE, file_errors

if TYPE_CHECKING:
    from costmodel.tuning.cache import CacheEntry
    from costmodel.tuning.tuning_key import WinnerCache

_MOST_NAMES = 20
_COMMANDS = ("list", "show", "verify", "clear")

app = typer.Typer(help="What tuning has kept on disk; without a command it is listed.")

Name = Annotated[str, typer.Argument(help="A part of the entry's file name, as `list` shows it.")]


@app.callback(invoke_without_command=True)
def cache(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        list_winners(as_json)
    elif as_json:  # said once, it holds for the command too
        context.default_map = {name: {"as_json": True} for name in _COMMANDS}


@app.command("list")
def list_winners(as_json: AsJson = False) -> None:
    """List the winners."""
    winners = _cache()
    entries = winners.entries()
    if as_json:
        output.print_json({"path": _path(winners), "entries": [_plain(e) for e in entries]})
        return
    output.print_table(
        f"{len(entries)} winners in {winners.path}",
        ["entry", "workload", "device", "chosen", "us", "model", "mode"],
        [
            [e.path.stem, str(r.workload), r.target.device.name, str(r.chosen), r.latency_us,
             r.model, r.mode]
            for e, r in ((e, e.result) for e in entries)
        ],
    )  # fmt: skip


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show one winner: what it rests on, what was timed, and why it was chosen."""
    found = [e for e in _cache().entries() if name in e.path.stem]
    if len(found) != 1:
        names = ", ".join(e.path.stem for e in found[:5]) or "none"
        raise InvalidInput(
            f"{name!r} is in the names of {len(found)} entries ({names}): expected 1; "
            f"`costmodel cache list` shows them"
        )
    (entry,) = found
    if as_json:
        output.print_json(_plain(entry))
        return
    result = entry.result
    rows = [["chosen", str(result.chosen)], ["why", result.why], ["source", result.source]]
    rows += [[name, str(value)] for name, value in entry.key.items()]
    output.print_table(str(entry.path), ["", "value"], rows)
    timed = [[str(c), m.latency_us if m.ok else None, m.status] for c, m in result.measured]
    output.print_table("timed", ["config", "us", "status"], timed)


@app.command()
def verify(as_json: AsJson = False) -> None:
    """Read every entry, and count those that can answer here; exit code 1 if a file is none."""
    winners = _cache()
    entries, unusable = winners.survey()
    counts = Counter(_state(entry) for entry in entries)
    names = [path.name for path in unusable[:_MOST_NAMES]]
    if as_json:
        output.print_json({
            "path": _path(winners), "unusable": len(unusable), "unusable_files": names, **counts,
        })  # fmt: skip
    else:
        rows = [*counts.items(), ("no entry, and ignored", len(unusable))]
        output.print_table(f"{winners.path}", ["files", "count"], rows)
        if unusable:
            more = len(unusable) - len(names)
            output.note(
                f"no entries: {', '.join(names)}{f' and {more} more' if more else ''}: delete them"
            )
    raise typer.Exit(1 if unusable else 0)


@app.command()
def clear(as_json: AsJson = False) -> None:
    """Forget all winners."""
    winners = _cache()
    removed, others = winners.clear()
    if as_json:
        output.print_json({"path": _path(winners), "removed": removed, "unusable": others})
    else:
        more = f", and {others} files that were no entries" if others else ""
        output.note(f"{removed} winners removed from {winners.path}{more}")


def _cache() -> WinnerCache:
    """Return the user's cache; its folder need not exist yet.

    Raises:
        FileError: its path is no folder, or cannot be read.
    """
    from costmodel.tuning.tuning_key import WinnerCache

    winners = WinnerCache()
    path = winners.path
    if path is not None and os.path.lexists(path):
        if not path.is_dir():
            raise FileError(
                f"{path}: expected the folder of winners; {CACHE_VARIABLE}=DIR names another"
            )
        with file_errors(path):
            os.scandir(path).close()  # listing it would find nothing, and not say why
    return winners


def _state(entry: CacheEntry[Any]) -> str:
    """Say if an entry still answers here, as far as can be told without a GPU."""
    from costmodel.gemm.space import grid_hash
    from costmodel.gemm.specialize import kernel_hashes
    from costmodel.hardware.installed import driver_version, triton_build
    from costmodel.hardware.target import Toolchain

    if entry.key.get("kernels") != kernel_hashes():
        return "of other kernels"
    if entry.key.get("space") != grid_hash():
        return "of another space"
    tools = Toolchain.current(entry.result.target.device.arch)
    here = {"triton": tools.triton, "triton_build": triton_build(), "ptxas": tools.ptxas}
    if any(entry.key.get(name) != value for name, value in here.items()):
        return "of another toolchain"
    if driver_version() and entry.key.get("driver") != driver_version():
        return "of another driver"
    return "of these kernels and this toolchain"


def _plain(entry: CacheEntry[Any]) -> dict[str, Any]:
    return {"path": str(entry.path), "key": dict(entry.key), "result": entry.result.to_dict()}


def _path(winners: WinnerCache) -> str | None:
    return None if winners.path is None else str(winners.path)
