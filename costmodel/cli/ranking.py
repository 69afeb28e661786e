"""``costmodel rank`` and ``explain``: the order of a product's configurations, and the reasons.

With ``-v`` both say which configurations are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

from costmodel.cli.common import (
    AsJson,
    Model,
    TargetName,
    answer,
    console_width,
    find_target,
    sureness,
    takes_product,
)
from costmodel.gemm.config import GemmConfig, parse_config
from costmodel.gemm.workload import Workload
from costmodel.validation import log, one_line

if TYPE_CHECKING:
    from costmodel.tuning.explanation import Explained, Explanation
    from costmodel.tuning.ranking import Ranking

_LEAST_PERCENT = 0.5
_TIMED = 8  # candidates that tuning times by default
_MIB = 2**20
_LABEL_WIDTH, _LEAST_WIDTH = 34, 24  # characters, including borders

# Labels of `explain`, and the texts beside them, with fields of `Explained`.
_LINES = {
    "predicted": "{predicted}",
    "answered": "{answered}",
    "share of the roofline": (
        "{roofline[percent]:.0f} %: {roofline[tflops]:.4g} TFLOP/s, {roofline[gbs]:.4g} GB/s"
    ),
    "blocks": "{grid[blocks]:.0f}, {grid[steps]:.0f} steps each",
    "useful work in the tiles": "{grid[useful_percent]:.0f} %",
    "waves": "{grid[waves]:.2f}, the last {grid[last_wave_full_percent]:.0f} % full",
    "blocks per multiprocessor": (
        "{grid[blocks_per_multiprocessor]:.2f} on average, "
        "{grid[imbalance_percent]:+.0f} % on the fullest"
    ),
    "of these, at once": (
        "{residency[blocks_per_multiprocessor]:.0f}, limited by {residency[limited_by]}"
    ),
    "bytes in flight": (
        "{residency[bytes_in_flight]}, {residency[in_flight_percent]:.0f} % of latency x bandwidth"
    ),
    "device memory traffic": "{traffic[device_memory_bytes]}, at least {traffic[least_bytes]}",
    "read through L2": "{traffic[l2_bytes]}",
    "binary": "{compiled}",
    "estimate on paper": "{paper_us[estimate]:.4g} us: {parts}",
    "splitting k": (
        "{config.split_k} ways: {traffic[split_k_bytes]} of partial sums, "
        "{traffic[split_k_us]:.3g} us"
    ),
}


@takes_product
def rank(
    workload: Workload,
    target: TargetName = None,
    top: Annotated[int, Option(min=1, help="How many to list.")] = 8,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Rank the configurations of a product, the fastest first; needs no GPU, compiles nothing."""
    from costmodel.tuning import ranking

    found = ranking.rank(workload, find_target(target), model, top)
    _log_skipped(found)
    rows = [[i + 1, str(config), found.predicted_us(i)] for i, config in enumerate(found.configs)]
    title = f"{workload} on {found.target.device.name}, by {found.model}"
    trust = sureness(found.expected_kept(len(found)), found.out_of_coverage, len(found))
    # Without a learned model a warning has said why.
    notes = (found.answered_by, trust, found.caveat) if found.answered_by else ()
    answer(
        as_json, found.to_dict(), (title, ["place", "config", "predicted us"], rows), notes=notes
    )


@takes_product
def explain(
    workload: Workload,
    place: Annotated[
        int | None, Argument(min=1, help="Compare this place of `costmodel rank` with the first.")
    ] = None,
    target: TargetName = None,
    top: Annotated[int, Option(min=1, help="How many configurations to explain.")] = 3,
    against: Annotated[
        str | None,
        Option(help='Compare this one with the first, such as "tma 128x256x64 w8 s4 g8".'),
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Explain the first ranks: by the estimate on paper and by the model; needs no GPU.

    docs/kernels.md, Names, explains the parts of a name such as "tma 128x256x64 w8 s4 g8".
    """
    from costmodel.tuning import explanation

    if place is not None and against is not None:
        raise BadParameter(f"{place} and --against: expected one of them beside the first")
    places = None if place is None else tuple(dict.fromkeys((1, place)))
    other = None if against is None else parse_config(against)
    found = explanation.explain(
        workload, find_target(target), model, top=top, places=places, against=other
    )
    ranking = found.ranking
    _log_skipped(ranking)
    notes = (
        f"no factors of a model: {found.no_factors}" if found.no_factors else "",
        sureness(ranking.expected_kept(_TIMED), ranking.out_of_coverage, _TIMED),
        ranking.caveat,
    )
    answer(as_json, found.to_dict(), *_tables(found), notes=notes)


def _tables(found: Explanation) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Make tables with a column for each configuration: the estimate, then the model's factors.

    A table has only as many columns as fit the console; the others follow in tables below it.
    """
    ranking, rows = found.ranking, found.rows
    title = (
        f"{ranking.workload} on {ranking.target.device.name}, by {ranking.model} "
        f"{ranking.model_hash}\nroofline {found.roofline_us:.4g} us, bound by "
        f"{rows[0].roofline['bound']}"
    )
    lines = [_lines(row) for row in rows]
    labels = dict.fromkeys(label for column in lines for label in column)
    tables = [(title, [[x, *(column.get(x, "–") for column in lines)] for x in labels])]
    if not found.no_factors:
        title = "effects on the prediction, as changes of the latency"
        tables.append((title, _factor_rows(rows)))
    at_once = max(2, (console_width() - _LABEL_WIDTH) // _LEAST_WIDTH)
    for title, cells in tables:
        for i in range(0, len(rows), at_once):
            shown = [f"{row.place}: {row.config}" for row in rows[i : i + at_once]]
            part = [[label, *columns[i : i + at_once]] for label, *columns in cells]
            yield "" if i else title, ["", *shown], part


def _lines(row: Explained) -> dict[str, str]:
    """Describe a configuration's launch, by label."""
    facts = {
        name: {key: _bytes(x) if "bytes" in key else x for key, x in getattr(row, name).items()}
        for name in ("roofline", "grid", "residency", "traffic", "paper_us")
    }
    predicted = "an order only" if row.predicted_us is None else f"{row.predicted_us:.4g} us"
    left_out = {
        "share of the roofline": row.roofline["percent"] is None,
        "splitting k": row.config.split_k == 1,
    }
    return {
        label: text.format(
            predicted=predicted, answered=row.answered_by or "rules", config=row.config,
            compiled=_binary(row), parts=_parts(row), **facts,
        )
        for label, text in _LINES.items()
        if not left_out.get(label)
    }  # fmt: skip


def _parts(row: Explained) -> str:
    """Name the parts of the estimate that run at the same time, and those that come after."""
    us = row.paper_us
    tail = f" with its tail of {us['tail']:.3g}" if us["tail"] > 0 else ""
    parts = [f"main loop {us['loop']:.3g}{tail}, in parallel device memory {us['dram']:.3g}"]
    for name, after in (("split", "adding up the splits"), ("repack", "copies")):
        if us[name] > 0:
            parts.append(f"{after} {us[name]:.3g}")
    return "; ".join(parts)


def _binary(row: Explained) -> str:
    if row.binary is None:
        return "not compiled yet"
    spill = row.binary["spill_bytes"]
    spills = f"{spill:.0f} bytes spilled" if spill else "no spills"
    shared = _bytes(row.binary["shared_bytes"])
    return f"{row.binary['registers']:.0f} registers, {spills}, {shared} shared"


def _factor_rows(rows: tuple[Explained, ...]) -> list[list[str]]:
    """Return rows from the estimate to the prediction; factors near 1 in all columns are joined."""
    factors = [row.factors or {} for row in rows]
    large = [
        concept
        for concept in dict.fromkeys(concept for column in factors for concept in column)
        if any(abs(100 * (column.get(concept, 1) - 1)) >= _LEAST_PERCENT for column in factors)
    ]
    rest = [prod(f for c, f in column.items() if c not in large) for column in factors]
    paper_us = [row.paper_us["estimate"] for row in rows]
    starts = [(row.start_us or us) / us for row, us in zip(rows, paper_us)]
    return [
        ["estimate on paper", *(f"{us:.4g} us" for us in paper_us)],
        ["average of the recording", *map(_change, starts)],
        *([c, *(_change(column.get(c, 1)) for column in factors)] for c in large),
        ["others, each under 0.5 %", *map(_change, rest)],
        ["predicted", *(f"{row.predicted_us:.4g} us" for row in rows)],
    ]


def _change(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def _bytes(count: Any) -> str:
    return f"{count / _MIB:.1f} MiB" if count >= _MIB else f"{count / 1024:.0f} KiB"


def _log_skipped(ranking: Ranking) -> None:
    """Log a line for each configuration that is illegal, or known not to compile or not to fit.

    A point of the grid that only repeats another one is in the ranking as that other one.
    """
    if log.isEnabledFor(logging.INFO):  # finding the reasons takes longer than ranking
        for config, reason in _skipped(ranking):
            log.info("%s: %s", config, one_line(reason))


def _skipped(ranking: Ranking) -> Iterator[tuple[GemmConfig, str]]:
    from costmodel.gemm.space import SearchSpace
    from costmodel.gemm.specialize import artifact_key, specialize
    from costmodel.models import known_artifacts

    workload, target = ranking.workload, ranking.target
    space = SearchSpace.of(workload, target)
    yield from space.rejected.items()
    known = known_artifacts(ranking.cost_model, target)
    most = target.device.shared_bytes
    for config in space.configs:
        artifact = known.get(artifact_key(specialize(workload, config), target))
        if artifact is None:
            continue
        if artifact.status == "compile_error":
            yield config, f"{artifact.status} {artifact.error}"
        elif artifact.ok and artifact.shared_bytes > most:
            yield config, f"shared memory: {artifact.shared_bytes} bytes, a block has {most}"
