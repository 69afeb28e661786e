"""``costmodel explain``: why configurations rank where they do, in words."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli import output
from costmodel.cli.options import AsJson, Model, TargetName, find_target, takes_product
from costmodel.cli.rank import log_skipped
from costmodel.gemm.workload import Workload

if TYPE_CHECKING:
    from costmodel.tuning.explanation import Explained, Explanation

_LEAST_PERCENT = 0.5
_TIMED = 8  # candidates, unless told otherwise
_MIB = 2**20
_LABEL_WIDTH, _LEAST_WIDTH = 34, 24  # characters, borders among them


@takes_product
def explain(
    workload: Workload,
    place: Annotated[
        int | None,
        typer.Argument(min=1, help="This one of `costmodel rank` beside the first, not --top."),
    ] = None,
    target: TargetName = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the ranking to explain.")] = 3,
    against: Annotated[
        str | None,
        typer.Option(help='This one beside the first, such as "tma 128x256x64 w8 s4 g8".'),
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Why the first configurations are first: on paper, and what the model adds; needs no GPU.

    What the parts of a name such as "tma 128x256x64 w8 s4 g8" mean: docs/kernels.md, Names.
    """
    from costmodel.gemm.config import parse_config
    from costmodel.tuning.explanation import explain as explain_ranking

    if place is not None and against is not None:
        raise typer.BadParameter(f"{place} and --against: expected one of them beside the first")
    places = None if place is None else tuple(dict.fromkeys((1, place)))
    other = None if against is None else parse_config(against)
    found = explain_ranking(
        workload, find_target(target), model, top=top, places=places, against=other
    )
    log_skipped(found.ranking, model)
    if as_json:
        output.print_json(found.to_dict())
        return
    _print(found)


def _print(found: Explanation) -> None:
    """Print a column for each configuration: the analytic estimate, then the model's factors."""
    ranking, rows = found.ranking, found.rows
    columns = [f"{row.place}: {row.config}" for row in rows]
    bound = rows[0].roofline["bound"]
    title = (
        f"{ranking.workload} on {ranking.target.device.name}, by {ranking.model} "
        f"{ranking.model_hash}\nroofline {found.roofline_us:.4g} us, bound by {bound}"
    )
    lines = [_lines(row) for row in rows]
    _print_columns(title, columns, _side_by_side(lines))
    if found.no_factors:
        output.note(f"no factors of a model: {found.no_factors}")
    else:
        title = "what the model makes of it, as a change of the latency"
        _print_columns(title, columns, _factor_rows(rows))
    sureness = output.sureness(ranking.expected_kept(_TIMED), ranking.out_of_coverage, _TIMED)
    for line in (sureness, ranking.caveat):
        if line:
            output.note(line)


def _print_columns(title: str, columns: list[str], lines: list[list[str]]) -> None:
    """Print a table, or several below each other, with as many columns as can be read."""
    at_once = max(2, (output.console_width() - _LABEL_WIDTH) // _LEAST_WIDTH)
    for i in range(0, len(columns), at_once):
        part = slice(i, i + at_once)
        output.print_table(
            title if i == 0 else "", ["", *columns[part]],
            [[line[0], *line[1:][part]] for line in lines],
        )  # fmt: skip


def _side_by_side(lines: list[dict[str, str]]) -> list[list[str]]:
    """Return a row for each label that any of the columns has."""
    labels = dict.fromkeys(label for column in lines for label in column)
    return [[label, *(column.get(label, "–") for column in lines)] for label in labels]


def _lines(row: Explained) -> dict[str, str]:
    """Describe the launch in plain words."""
    roof, grid, here, traffic = row.roofline, row.grid, row.residency, row.traffic
    lines = {
        "predicted": "an order only" if row.predicted_us is None else f"{row.predicted_us:.4g} us",
        "answered": row.answered_by or "rules",
        "of the roofline": _rates(row),
        "blocks": f"{grid['blocks']:.0f}, {grid['steps']:.0f} steps each",
        "useful work in the tiles": f"{grid['useful_percent']:.0f} %",
        "waves": f"{grid['waves']:.2f}, the last {grid['last_wave_full_percent']:.0f} % full",
        "blocks of each multiprocessor": (
            f"{grid['blocks_per_multiprocessor']:.2f} on average, "
            f"{grid['imbalance_percent']:+.0f} % on the fullest"
        ),
        "of these at once": (
            f"{here['blocks_per_multiprocessor']:.0f}, limited by {here['limited_by']}"
        ),
        "bytes in flight": (
            f"{_bytes(here['bytes_in_flight'])}, {here['in_flight_percent']:.0f} % of "
            f"latency x bandwidth"
        ),
        "from and to device memory": (
            f"{_bytes(traffic['device_memory_bytes'])}, at least {_bytes(traffic['least_bytes'])}"
        ),
        "asked of L2": _bytes(traffic["l2_bytes"]),
        "binary": _binary(row),
        "estimate on paper": f"{row.paper_us['estimate']:.4g} us: {_parts(row)}",
    }
    if roof["percent"] is None:
        del lines["of the roofline"]
    if row.config.split_k > 1:
        lines["splitting k"] = (
            f"{row.config.split_k} ways: {_bytes(traffic['split_k_bytes'])} of partial sums, "
            f"{traffic['split_k_us']:.3g} us"
        )
    return lines


def _rates(row: Explained) -> str:
    roof = row.roofline
    if roof["percent"] is None:
        return ""
    return f"{roof['percent']:.0f} %: {roof['tflops']:.4g} TFLOP/s, {roof['gbs']:.4g} GB/s"


def _parts(row: Explained) -> str:
    """Name the parts of the estimate that run side by side, and those that come after."""
    us = row.paper_us
    tail = f" with its tail of {us['tail']:.3g}" if us["tail"] > 0 else ""
    parts = [f"main loop {us['loop']:.3g}{tail}, beside it device memory {us['dram']:.3g}"]
    for name, after in (("split", "adding up the splits"), ("repack", "copies")):
        if us[name] > 0:
            parts.append(f"{after} {us[name]:.3g}")
    return "; ".join(parts)


def _binary(row: Explained) -> str:
    if row.binary is None:
        return "not compiled yet"
    registers, spill, shared = (
        row.binary[name] for name in ("registers", "spill_bytes", "shared_bytes")
    )
    spills = f"{spill:.0f} bytes spilled" if spill else "no spills"
    return f"{registers:.0f} registers, {spills}, {_bytes(shared)} shared"


def _factor_rows(rows: tuple[Explained, ...]) -> list[list[str]]:
    """Return rows from the estimate to the prediction; factors near 1 everywhere are joined."""
    factors = [row.factors or {} for row in rows]
    large = [
        concept
        for concept in dict.fromkeys(concept for column in factors for concept in column)
        if any(abs(100 * (column.get(concept, 1) - 1)) >= _LEAST_PERCENT for column in factors)
    ]
    rest = [prod(f for c, f in column.items() if c not in large) for column in factors]
    paper_us = [row.paper_us["estimate"] for row in rows]
    starts = [(row.start_us or us) / us for row, us in zip(rows, paper_us, strict=True)]
    return [
        ["estimate on paper", *(f"{us:.4g} us" for us in paper_us)],
        ["on average in the recording", *map(_change, starts)],
        *([c, *(_change(column.get(c, 1)) for column in factors)] for c in large),
        ["others, each under 0.5 %", *map(_change, rest)],
        ["predicted", *(f"{row.predicted_us:.4g} us" for row in rows)],
    ]


def _change(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def _bytes(count: Any) -> str:
    return f"{count / _MIB:.1f} MiB" if count >= _MIB else f"{count / 1024:.0f} KiB"
