"""``costmodel kernels``: the timings of Triton kernels that tuning has kept on disk."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import asdict
from math import exp, nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option, Typer, echo

from costmodel.cli.cache import (
    check_folder,
    check_only_one,
    check_removed,
    list_by_default,
    tell_unusable,
)
from costmodel.cli.common import AsJson, Yes, answer, confirm, note
from costmodel.errors import InvalidInput, MissingData, NoModel
from costmodel.files import Named, cache_directory, decode, file_errors
from costmodel.validation import one_line

if TYPE_CHECKING:
    from costmodel.autotune.store import KernelEntry, KernelStore

Name = Annotated[str, Argument(help="A part of the file name, such as the kernel's name.")]

_COLUMNS = "kernel key device tried us gain"

app = Typer(help="Timings of Triton kernels on disk; without a command they are listed.")


@app.command("list")
def list_kernels(as_json: AsJson = False) -> None:
    """List the kernels: what was timed, and what the choice gains over the median."""
    store = _store()
    entries = [_plain(entry) for entry in store.entries()]
    rows = [
        [e["kernel"], e["values"], e["key"]["device"], e["tried"], e["us"], e["gain"]]
        for e in entries
    ]
    answer(
        as_json,
        {"path": str(store.path), "entries": entries},
        (f"{len(rows)} tuned calls of kernels in {store.path}",
         _COLUMNS.split(), rows),
    )  # fmt: skip


list_by_default(app, list_kernels)


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show all timings of a kernel, the best first, and how its configuration was chosen."""
    entries = _find(name)
    tables = []
    for e in entries:
        choice = {"choice": e["chosen"] and _source(e["chosen"])}
        about = choice | {fact: e[fact] for fact in ("why", "tried")} | e["key"]
        timed = [
            [_source(m["config"]), m["latency_us"], m["status"], one_line(m["error"])]
            for m in e["measured"]
        ]
        tables.append((e["path"], ["", "value"], about.items()))
        tables.append(("timed", ["config", "us", "status", "reason"], timed))
    answer(as_json, entries, *tables)


@app.command()
def explain(
    name: Name,
    model: Annotated[
        Path | None, Option(help="Folder of a model of kernels; default: the shipped one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a model puts a kernel's winner before its rival, or does not.

    The rival is the one that the model ranks first among all others. If the kernel was tuned for
    several keys, the last one is explained.
    """
    from costmodel.autotune.model import KernelModel, columns_of
    from costmodel.autotune.prior import model_for

    entry = max(_find(name, with_choice=True), key=lambda e: e["when"])
    binaries, winner = entry["binaries"], entry["chosen"]
    us = {m["config"]: m["latency_us"] for m in entry["measured"] if m["config"] in binaries}
    if winner not in us or len(us) < 2:
        raise MissingData(f"{entry['path']}: of fewer than two configurations the binary is known")
    ranker = KernelModel.load(model) if model else model_for(entry["key"]["arch"])
    if ranker is None:
        raise NoModel("no model of kernels is shipped for this GPU: `costmodel train`, and --model")
    columns = columns_of([*us], entry["arguments"], binaries)
    predicted = dict(zip(us, ranker.predict("after", columns)[0].tolist()))
    factors = dict(zip(us, ranker.factors(columns)))
    order = sorted(us, key=predicted.__getitem__)
    pair = [winner, next(config for config in order if config != winner)]
    found = [
        {
            "config": config,
            "latency_us": us[config],
            "place": order.index(config) + 1,
            "predicted": exp(predicted[config]),
            "factors": factors[config],
        }
        for config in pair
    ]
    facts = {"timed, us": "latency_us", "place": "place", "over the median": "predicted"}
    rows = [[label, *(x[key] for x in found)] for label, key in facts.items()]
    rows += [
        [concept, *(f"{100 * (x['factors'][concept] - 1):+.1f} %" for x in found)]
        for concept in factors[winner]
    ]
    title = f"{entry['kernel']} {entry['values']}: effects on the prediction, of {len(us)} places"
    answer(
        as_json,
        {"kernel": entry["key"]["name"], "key": entry["key"], "explained": found},
        (title, ["", *map(_source, pair)], rows),
    )


@app.command()
def verify(as_json: AsJson = False) -> None:
    """Read every file; exit code 1 if one is not an entry."""
    store = _store()
    entries, unusable = store.survey()
    tell_unusable(as_json, store.path, {"entries": len(entries)}, unusable)


@app.command()
def clear(name: Name = "", yes: Yes = False, as_json: AsJson = False) -> None:
    """Forget all timings, or those of one kernel; asks before it forgets all."""
    store = _store()
    confirm(f"all timings in {store.path}", yes or name)
    with file_errors(store.path or Path()):
        removed = store.clear(name)
    check_removed(name, removed, "kernels")
    answer(
        as_json,
        {"path": str(store.path), "removed": removed},
        notes=[f"{removed} files removed from {store.path}"],
    )


@app.command()
def export(
    name: Name,
    kind: Annotated[
        Literal["configs", "fla"],
        Option("--format", help="configs: Python source; fla: JSON that fla reads."),
    ] = "configs",
    as_json: AsJson = False,
) -> None:
    """Print a kernel's winners as Python source, or as a file for Flash Linear Attention."""
    text = (_as_fla if kind == "fla" else _as_source)(_find(name, with_choice=True))
    echo(json.dumps({"text": text}) if as_json else text)


@app.command()
def record(
    folder: Annotated[Path, Argument(help="Folder of the dataset; an existing one is extended.")],
    package: Annotated[
        list[str] | None,
        Option(help="NAME=VERSION of a package that is not installed; NAME as imported."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the timings to a dataset, to train a model on; an existing one is extended."""
    from costmodel.autotune.dataset import KernelDataset, role_of
    from costmodel.data.shards import CARD, require_place

    require_place(folder, "dataset of kernels")
    packages = {}
    for text in package or ():
        name, _, version = text.partition("=")
        if not (name and version):
            raise InvalidInput(f"--package {text}: expected NAME=VERSION, such as fla=0.6.0")
        packages[name] = f"{name} {version}"
    base = KernelDataset.read(folder) if (folder / CARD).exists() else None
    entries = _store().entries()
    allowed = [entry for entry in entries if role_of(entry.key["name"])]
    dataset = KernelDataset.of(allowed, packages, base=base)
    dataset.write(folder)
    card = dataset.card()
    never = len(entries) - len(allowed)
    answer(
        as_json,
        {"path": str(folder), **card},
        (f"{folder}: {len(dataset.rows)} rows", ["package", "kernels", "lists", "rows"],
         [[*counts.values()] for counts in card["packages"]]),
        notes=[f"{never} tuned calls left out: no model may learn from these kernels"][:never],
    )  # fmt: skip


# --- Formats --------------------------------------------------------------------------------------

_SOURCE = """\
# {name}: winners of {keys} keys. A text in <> stands for a function or a file, which are not kept.
import torch
import triton
import triton.language as tl

configs = [
{lines}]"""


def _as_source(entries: list[Named]) -> str:
    """Return a list of the winners, the most frequent first."""
    won = Counter(e["chosen"] for e in entries).most_common()
    lines = (
        f"    triton.Config({_source(c)}),  # wins for {times} of {len(entries)} keys\n"
        for c, times in won
    )
    name = one_line(entries[0]["key"]["name"])
    return _SOURCE.format(name=name, keys=len(entries), lines="".join(lines))


def _source(config: str) -> str:
    """Return the arguments of ``triton.Config`` for a configuration's name, as source text."""
    options = decode(config, Named)
    constants = _literal(options.pop("kwargs"))
    one_cta = ("num_ctas", 1)  # nearly all have this, so it is not shown
    given = {k: v for k, v in options.items() if v is not None and (k, v) != one_cta}
    return ", ".join([constants, *(f"{k}={_literal(v)}" for k, v in given.items())])


def _literal(value: Any) -> str:
    match value:
        case {"type": "triton.language.core.dtype", "text": text}:
            return f"tl.dtype({text!r})"
        case {"type": "torch.dtype", "text": str(text)} if re.fullmatch(r"torch\.\w+", text):
            return text
        case {"type": _, "text": str(text)}:
            return repr(f"<{text.strip('<>')}>")
        case dict():
            return f"{{{', '.join(f'{name!r}: {_literal(v)}' for name, v in value.items())}}}"
        case list():
            return f"({''.join(f'{_literal(item)}, ' for item in value)})"
    return repr(value)


def _as_fla(entries: list[Named]) -> str:
    """Return the content of ``configs/<GPU>/<kernel>.json``: a configuration for each key.

    fla finds a configuration by the values of the tuner's key and the data types, in order.
    """
    name, devices = entries[0]["kernel"], sorted({e["key"]["device"] for e in entries})
    check_only_one(name, devices, "devices", "kernels")
    found = {}
    for e in sorted(entries, key=lambda e: e["when"]):  # the last choice counts
        config = decode(e["chosen"], Named)
        parts = [config.pop("pre_hook"), config["ir_override"], *config["kwargs"].values()]
        if any(isinstance(part, dict) for part in parts):
            note(f"left out, since fla's files hold plain values alone: {e['values']}")
            continue
        values = [*e["key"]["key"].values()]
        text = json.dumps(values, separators=(",", ":"))
        found[hashlib.md5(text.encode()).hexdigest()] = {"autotune_key": values, "config": config}
    configs = [entry["config"] for entry in found.values()]
    content = {
        "kernel_name": name,
        "triton_version": entries[0]["key"]["triton"],
        "autotune_entries": found,
        "default_config": max(configs, key=configs.count, default=None),
    }
    folder = re.sub(r"[^0-9A-Za-z]+", "_", devices[0]).strip("_")  # as fla names it
    note(f"fla reads configs/{folder}/{name}.json where FLA_CACHE_MODE is strict or full")
    return json.dumps(content, indent=1)


# --- What an entry says ---------------------------------------------------------------------------


def _store() -> KernelStore:
    from costmodel.autotune.store import KernelStore

    return KernelStore(check_folder(check_folder(cache_directory()) / "kernels"))


def _find(name: str, *, with_choice: bool = False) -> list[Named]:
    """Return the entries of the one kernel that a name, or a part of it, fits.

    Raises:
        InvalidInput: several kernels, or none. MissingData: no entry has a choice.
    """
    store = _store()
    files = store.named(name)
    timed = [_plain(entry) for entry in store.entries() if entry.path in files]
    found = [e for e in timed if e["chosen"] or not with_choice]
    if timed and not found:
        raise MissingData(
            f"{name!r} is timed, but not chosen: run the program again, which ends its tuning; "
            f"`costmodel kernels show {name}` shows the timings"
        )
    check_only_one(name, sorted({e["key"]["name"] for e in found}), "kernels", "kernels")
    return found


def _plain(entry: KernelEntry) -> Named:
    """Return an entry for JSON, with its timings in order: the best first, failures last."""
    timed = sorted(entry.measured.items(), key=lambda item: (not item[1].ok, item[1].latency_us))
    us = next((m.latency_us for config, m in timed if config == entry.chosen), nan)
    values = entry.key["key"].items()
    untried = {*entry.untried} - entry.measured.keys()
    return {
        **asdict(entry),
        "path": str(entry.path),
        "measured": [{"config": config, **asdict(m)} for config, m in timed],
        "kernel": entry.key["name"].rpartition(".")[2],
        "values": " ".join(f"{k}={str(value).removeprefix('torch.')}" for k, value in values),
        "tried": f"{len(timed)} of {len(timed) + len(untried)}",
        "us": us,
        "gain": median([m.latency_us for _, m in timed if m.ok] or [nan]) / us,
    }
