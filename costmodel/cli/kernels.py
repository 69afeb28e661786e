"""``costmodel kernels``: the timings of Triton kernels that tuning has kept on disk."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli.cache import check_folder
from costmodel.cli.common import AsJson, answer
from costmodel.data.measurement import Measurement
from costmodel.errors import InvalidInput
from costmodel.files import cache_directory, decode, encode, file_errors, replace_file
from costmodel.validation import one_line

if TYPE_CHECKING:
    from costmodel.autotune.store import Kept, KernelEntry, KernelStore

_NEAR = 1.02  # as fast as the winner, within what timings are off
_ONE_CTA = ("num_ctas", 1)  # as nearly all have
_COMMANDS = ("list", "show", "verify", "clear", "export")

Name = Annotated[str, typer.Argument(help="A part of the file name, such as the kernel's name.")]
AnyName = Annotated[str, typer.Argument(help="A part of the file name; default: all.")]

app = typer.Typer(help="Timings of Triton kernels on disk; without a command they are listed.")


class Format(StrEnum):
    """Formats of an export."""

    configs = "configs"
    fla = "fla"


@app.callback(invoke_without_command=True)
def kernels(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        list_kernels(as_json)
    elif as_json:  # said once, it holds for the command too
        context.default_map = {name: {"as_json": True} for name in _COMMANDS}


@app.command("list")
def list_kernels(as_json: AsJson = False) -> None:
    """List the kernels: what was timed, and what the choice gains over the median."""
    store = _store()
    data, rows = [], []
    for entry in store.entries():
        kept = entry.kept
        us, gain = _us(kept, kept.chosen), _gain(kept)
        data.append({**_plain(entry), "chosen_us": us, "gain": gain})
        rows.append([_kernel(entry), _values(entry), str(entry.key.get("device", "")),
                     len(kept.measured), us, gain])  # fmt: skip
    columns = ["kernel", "key", "device", "timed", "us", "gain"]
    answer(
        as_json,
        {"path": str(store.path), "entries": data},
        (f"{len(rows)} tuned calls of kernels in {store.path}", columns, rows),
    )


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show all timings of a kernel, the best first, and how its configuration was chosen."""
    entries = _find(name)
    tables: list[tuple[str, list[str], list[Any]]] = []
    for entry in entries:
        kept = entry.kept
        chosen = _short(kept.chosen) if kept.chosen else None
        about = {"chosen": chosen, "why": kept.why, "when": kept.when, **entry.key}
        about["key"] = _values(entry)
        timed = [
            [_short(config), m.latency_us if m.ok else None, m.status, one_line(m.error)]
            for config, m in _ranked(kept).items()
        ]
        tables.append((entry.path.name, ["", "value"], [*about.items()]))
        tables.append(("timed", ["config", "us", "status", "reason"], timed))
    answer(as_json, [_plain(entry) for entry in entries], *tables)


@app.command()
def verify(as_json: AsJson = False) -> None:
    """Read every file; exit code 1 if one is no entry."""
    store = _store()
    entries, unusable = store.survey()
    names = [path.name for path in unusable]
    answer(
        as_json,
        {"path": str(store.path), "entries": len(entries), "unusable_files": names},
        (str(store.path), ["files", "count"],
         [("entries", len(entries)), ("no entry, and ignored", len(names))]),
        notes=[f"no entries: {', '.join(names)}: delete them"] if names else [],
    )  # fmt: skip
    raise typer.Exit(1 if names else 0)


@app.command()
def clear(name: AnyName = "", as_json: AsJson = False) -> None:
    """Forget all timings, or those of one kernel."""
    store = _store()
    with file_errors(store.path or Path()):
        removed = store.clear(name)
    answer(
        as_json,
        {"path": str(store.path), "removed": removed},
        notes=[f"{removed} files removed from {store.path}"],
    )


@app.command()
def export(
    name: Name,
    kind: Annotated[
        Format, typer.Option("--format", help="configs: Python source; fla: JSON that fla reads.")
    ] = Format.configs,
    output: Annotated[Path | None, typer.Option(help="Default: stdout.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a kernel's winners as Python source, or as a file of Flash Linear Attention's."""
    entries = [entry for entry in _find(name) if _winners(entry.kept)]
    names = sorted({str(entry.key.get("name")) for entry in entries})
    if len(names) != 1:
        raise InvalidInput(
            f"{name!r} is in the names of {len(names)} kernels with a winner "
            f"({', '.join(names[:5]) or 'none'}): expected 1; `costmodel kernels list` shows them"
        )
    text, notes = (_as_fla if kind is Format.fla else _as_source)(entries)
    if output is not None:
        with file_errors(output):
            replace_file(output, text.encode())
    elif not as_json:
        typer.echo(text, nl=False)
    data = {"kernel": names[0], "format": kind.value, "output": output and str(output)}
    answer(as_json, {**data, "text": text, "notes": notes}, notes=notes)


# --- Formats --------------------------------------------------------------------------------------


def _as_source(entries: list[KernelEntry]) -> tuple[str, list[str]]:
    """Return a list of configurations: winners, the most frequent first, then near winners."""
    won: Counter[str] = Counter()
    for entry in entries:
        won.update({config: int(not rank) for rank, config in enumerate(_winners(entry.kept))})
    lines, notes = [], []
    for config, times in won.most_common():
        source = _source(_parts(config))
        if source is None:
            notes.append(f"left out, since not all of it is kept: {_short(config)}")
        else:
            lines += [f"    # wins for {times} of {len(entries)} keys", f"    {source},"]
    title = f"{entries[0].key.get('name')}: winners, and what is within 2 % of one"
    head = ["import torch", "import triton", "import triton.language as tl", "", "configs = ["]
    return "\n".join([f"# {one_line(title)}", *head, *lines, "]", ""]), notes


def _source(parts: _Parts) -> str | None:
    """Return the call that makes a configuration; None if a part is not known by its source."""
    values = {name: _literal(value) for name, value in parts.kwargs.items()}
    if None in values.values() or parts.ir_override:
        return None
    inner = ", ".join(f"{name!r}: {value}" for name, value in values.items())
    text = f"triton.Config({{{inner}}}"
    text += f", num_warps={parts.num_warps}, num_stages={parts.num_stages}"
    text += f", num_ctas={parts.num_ctas}" if parts.num_ctas != 1 else ""
    text += f", maxnreg={parts.maxnreg}" if parts.maxnreg else ""
    return text + (", pre_hook=...)" if parts.pre_hook else ")")


def _literal(value: Any) -> str | None:
    match value:
        case {"type": "triton.language.core.dtype", "text": text}:
            return f"tl.dtype({text!r})"
        case {"type": "torch.dtype", "text": str(text)} if re.fullmatch(r"torch\.\w+", text):
            return text
        case dict():
            return None
        case list():
            items = [_literal(item) for item in value]
            return None if None in items else f"({''.join(f'{item}, ' for item in items)})"
    return repr(value)


def _as_fla(entries: list[KernelEntry]) -> tuple[str, list[str]]:
    """Return the content of ``configs/<GPU>/<kernel>.json``: a configuration for each key.

    fla finds it by the values of the tuner's key, and the data types, in their order.
    """
    devices = sorted({str(entry.key.get("device", "")) for entry in entries})
    if len(devices) != 1:
        raise InvalidInput(f"timings of {', '.join(devices)}: a file of fla's is for one device")
    found: dict[str, dict[str, Any]] = {}
    notes = []
    for entry in sorted(entries, key=lambda entry: entry.kept.when):  # the last choice counts
        config, key = asdict(_parts(_winners(entry.kept)[0])), entry.key.get("key")
        plain = not any(isinstance(value, dict) for value in config["kwargs"].values())
        if config.pop("pre_hook") or config["ir_override"] or not plain or type(key) is not dict:
            notes.append(f"left out, since fla's files hold plain values alone: {_values(entry)}")
            continue
        values = list(key.values())
        text = json.dumps(values, separators=(",", ":"), sort_keys=True)
        found[hashlib.md5(text.encode()).hexdigest()] = {"autotune_key": values, "config": config}
    winners = Counter(json.dumps(value["config"]) for value in found.values())
    kernel = _kernel(entries[0])
    content = {
        "kernel_name": kernel,
        "triton_version": entries[0].key.get("triton"),
        "autotune_entries": found,
        "default_config": json.loads(winners.most_common(1)[0][0]) if winners else None,
    }
    folder = re.sub(r"[^0-9A-Za-z]+", "_", devices[0]).strip("_")  # as fla names it
    notes.append(f"fla reads configs/{folder}/{kernel}.json where FLA_CACHE_MODE is strict or full")
    return encode(content).decode(), notes


# --- What an entry says ---------------------------------------------------------------------------


def _store() -> KernelStore:
    from costmodel.autotune.store import KernelStore

    return KernelStore(check_folder(cache_directory() / "kernels"))


def _find(name: str) -> list[KernelEntry]:
    entries = _store().entries()
    found = [entry for entry in entries if name in entry.path.name]
    if not found:
        raise InvalidInput(
            f"{name!r} is in the names of none of {len(entries)} entries; "
            f"`costmodel kernels list` shows them"
        )
    return found


def _kernel(entry: KernelEntry) -> str:
    return str(entry.key.get("name", "")).rpartition(".")[2]


def _values(entry: KernelEntry) -> str:
    """Return the tuner's key in a line."""
    values = entry.key.get("key", ())
    if not isinstance(values, dict):
        return one_line(values)
    return " ".join(f"{k}={str(value).removeprefix('torch.')}" for k, value in values.items())


def _us(kept: Kept, config: str | None) -> float | None:
    measurement = kept.measured.get(config or "")
    return measurement.latency_us if measurement and measurement.ok else None


def _gain(kept: Kept) -> float | None:
    """Return how many times as fast as the median the choice is."""
    us = _us(kept, kept.chosen)
    return us and median(m.latency_us for m in kept.measured.values() if m.ok) / us


def _ranked(kept: Kept) -> dict[str, Measurement]:
    """Return what was timed, the best first, and then what failed."""

    def rank(timed: tuple[str, Measurement]) -> tuple[bool, float]:
        return not timed[1].ok, timed[1].latency_us

    return dict(sorted(kept.measured.items(), key=rank))


def _winners(kept: Kept) -> list[str]:
    """Return the choice, else the best, and then what is as fast within 2 %."""
    timed = {config: m.latency_us for config, m in _ranked(kept).items() if m.ok}
    winner = kept.chosen or next(iter(timed), None)
    if winner is None:
        return []
    near = [c for c, us in timed.items() if us <= timed.get(winner, 0) * _NEAR and c != winner]
    return [winner, *near]


@dataclass(frozen=True)
class _Parts:
    """The parts of a configuration, from its name."""

    kwargs: dict[str, Any]
    num_warps: int
    num_stages: int
    num_ctas: int
    maxnreg: int | None
    ir_override: str | None
    pre_hook: dict[str, str] | None


def _parts(config: str) -> _Parts:
    return decode(config, _Parts)


def _short(config: str) -> str:
    """Return a configuration's name for people."""
    options = asdict(_parts(config))
    values = options.pop("kwargs")
    values |= {k.removeprefix("num_"): v for k, v in options.items() if v and (k, v) != _ONE_CTA}
    texts = (f"{k}={v.get('text', v) if isinstance(v, dict) else v}" for k, v in values.items())
    return " ".join(texts)


def _plain(entry: KernelEntry) -> dict[str, Any]:
    kept = entry.kept
    timed = [{"config": config, **asdict(m)} for config, m in _ranked(kept).items()]
    return {
        "path": str(entry.path), "key": dict(entry.key), "chosen": kept.chosen, "why": kept.why,
        "when": kept.when, "measured": timed,
    }  # fmt: skip
