"""``costmodel report --html``: how good a model is, on one page; needs no GPU.

Predictions are made anew from a data set and a model. Timings against torch and learning curves
come from ``benchmarks/results/``, and are left out where no file of the data set's device has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from costmodel.data.shards import require_file_place, write_file
from costmodel.errors import CorruptFile
from costmodel.evaluation.evaluate import Problem, evaluate, problems_of
from costmodel.gemm.specialize import kernel_hashes
from costmodel.models import TrainingTable, XgbCostModel
from costmodel.reports.comparison import compared_models
from costmodel.reports.correlation import correlations
from costmodel.reports.html_page import Figure, Section, Table, cut, figure, page
from costmodel.reports.report import PLOTS, Results, read_results

if TYPE_CHECKING:
    from costmodel.data.dataset import Dataset

_WORST = 15
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)


def write_html(
    path: Path, dataset: Dataset, model: XgbCostModel | None, results: Path | None = None
) -> list[str]:
    """Write :func:`html_report` to a file, whole or not at all; the titles of its sections.

    Raises:
        FileError: it cannot be written. Others as :func:`html_report`.
    """
    require_file_place(path)  # making the page takes a while
    text, titles = html_report(dataset, model, results)
    write_file(path, text.encode())
    return titles


def html_report(
    dataset: Dataset, model: XgbCostModel | None, results: Path | None = None
) -> tuple[str, list[str]]:
    """The page, and the titles of its sections.

    Args:
        dataset: has eval rows, which the model is judged on.
        model: the learned model; None shows the baselines alone.
        results: folder of benchmark results; None has none.

    Raises:
        MissingData: the data set holds no eval rows that worked, or matplotlib is not there.
        CorruptFile: a results file is not one.
    """
    frame = dataset.frame("eval", kernel_hashes=kernel_hashes())
    problems = problems_of(frame, dataset.target.device)
    sections = [_head(dataset, model, problems), _kept(dataset, model)]
    if model is not None:
        costs = [model.predict(p.workload, p.candidates, dataset.target) for p in problems]
        sections += [_accuracy(problems, costs), _worst(problems, costs)]
    sections += [_correlations(dataset), *_from_results(results, dataset, model)]
    title = f"costmodel on {dataset.target.device.product}"
    return page(title, sections), [section.title for section in sections]


def _head(dataset: Dataset, model: XgbCostModel | None, problems: Sequence[Problem]) -> Section:
    target = dataset.target
    timed = sum(len(p.candidates) for p in problems)
    facts = [
        ("data set", f"{dataset.path.name}, begun {dataset.created}"),
        ("device", target.device.product),
        ("compiled by", f"Triton {target.toolchain.triton}, ptxas {target.toolchain.ptxas}"),
        ("judged on", f"{len(problems)} held-out workloads, {timed} timed configurations"),
        ("model", f"{model.name} {model.hash}" if model else "none: baselines only"),
        *(
            (f"its training: {name}", _fact(x))
            for name, x in (model.card.training if model else {}).items()
        ),
    ]
    return Section("What this is of", (Table(["", ""], facts),))


def _fact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cut(count)}" for name, count in value.items())
    return value


def _kept(dataset: Dataset, model: XgbCostModel | None) -> Section:
    """The table of all models side by side, as ``costmodel evaluate`` gives it."""
    models, reason = compared_models(dataset, model)
    entries = evaluate(dataset, models, dataset.target)
    ks = list(entries[0]["regret"])
    rows = [
        [e["name"], e["kind"], *(e["regret"][k]["geomean_pct"] for k in ks),
         *(e["regret"][k]["worst_pct"] for k in ks), e["kendall_tau"], e["mape_pct"]]
        for e in entries
    ]  # fmt: skip
    columns = ["model", "kind", *(f"top-{k}, %" for k in ks), *(f"worst of top-{k}" for k in ks),
               "Kendall tau", "mean error, %"]  # fmt: skip
    text = (
        "The best latency of a workload over the best among the first k of a model: geometric "
        "mean over the workloads, and the worst of them."
    )
    plot = figure(lambda axes: PLOTS["evaluate"](axes, {"rows": entries}), "speed kept over k")
    left_out = (f"Left out: {reason}",) if reason else ()
    return Section("Speed kept", (text, plot, Table(columns, rows), *left_out))


def _accuracy(problems: Sequence[Problem], costs: Sequence[NDArray[np.float64]]) -> Section:
    measured = np.concatenate([p.latency_us for p in problems])
    predicted = np.concatenate(costs)
    works = np.isfinite(measured) & (predicted > 0)
    measured, predicted = measured[works], predicted[works]
    error = 100 * np.abs(predicted / measured - 1)

    def draw(axes: Any) -> None:
        bins = np.geomspace(min(measured.min(), predicted.min()),
                            max(measured.max(), predicted.max()) * 1.01, 160)  # fmt: skip
        axes.hist2d(measured, predicted, bins=(bins, bins), norm="log", cmap="viridis", cmin=1)
        axes.plot(bins[[0, -1]], bins[[0, -1]], "k-", linewidth=0.7, label="exact")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("measured, us")
        axes.set_ylabel("predicted, us")

    text = (
        f"{len(measured)} configurations of {len(problems)} workloads; off by "
        f"{np.median(error):.1f} % in the median, {np.mean(error):.1f} % in the mean, "
        f"{np.percentile(error, 95):.1f} % for the worst twentieth. Darker is fewer of them."
    )
    alt = "predicted latency over measured latency, both in logarithms"
    return Section("Predicted and measured", (text, figure(draw, alt, (7, 6))))


def _worst(problems: Sequence[Problem], costs: Sequence[NDArray[np.float64]]) -> Section:
    rows = sorted((_choice(p, c) for p, c in zip(problems, costs, strict=True)), key=lambda r: r[1])
    columns = ["workload", "kept of top-1, %", "of top-8, %", "first choice", "predicted us",
               "measured us", "best there is", "predicted us", "measured us"]  # fmt: skip
    text = "The workloads where the first choice keeps least, with that choice and the best."
    return Section("The worst workloads", (text, Table(columns, rows[:_WORST])))


def _choice(problem: Problem, cost: NDArray[np.float64]) -> list[Any]:
    """A row about one workload: what is kept, the first choice, and the best there is."""
    kept = [100 * share for share in problem.kept_at(cost, (1, 8))]
    first, best = int(np.nanargmin(cost)), int(np.nanargmin(problem.latency_us))
    row: list[Any] = [str(problem.workload), *kept]
    for i in (first, best):
        config = problem.candidates.configs[i]
        row += [str(config), float(cost[i]), float(problem.latency_us[i])]
    return row


def _correlations(dataset: Dataset) -> Section:
    """From what models are trained on; from the eval rows where there is nothing else."""
    data = TrainingTable.from_dataset(dataset)
    if not data.ok().any():
        data = TrainingTable.from_dataset(dataset, "eval")
    features, columns = correlations(data)
    title = "Features and latency"
    if not features:
        return Section(title, ("Too few rows to correlate anything.",))
    values = np.array([*columns.values()]).T

    def draw(axes: Any) -> None:
        picture = axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_yticks(range(len(features)), features, fontsize=8)
        axes.set_xticks(range(len(columns)), [*columns], fontsize=8)
        axes.figure.colorbar(picture, ax=axes)

    text = (
        f"Spearman's correlation of a feature with the latency among the configurations of one "
        f"workload, mean over {len(data.workloads)} workloads: red goes along with slow, blue with "
        f"fast. The {len(features)} largest."
    )
    rows = [[name, *map(float, row)] for name, row in zip(features, values, strict=True)]
    shown = figure(draw, "correlation of features with latency, by kernel", (8, 7))
    return Section(title, (text, shown, Table(["feature", *columns], rows)))


def _from_results(
    folder: Path | None, dataset: Dataset, model: XgbCostModel | None
) -> Iterator[Section]:
    """The results of benchmarks that were run on this device."""
    for path in sorted(folder.glob("*.json")) if folder else ():
        name = path.stem.split("-")[0]
        if name not in _RESULTS:
            continue
        results = read_results(path)
        if results["target"] != dataset.target.device.name:
            continue
        try:
            if not all(isinstance(row, dict) for row in results["rows"]):
                raise TypeError("rows: expected objects")
            section = _RESULTS[name](path.stem, results)
            notice = _of_another_model(results, model)
        except _MALFORMED as error:
            raise CorruptFile(
                f"{path}: its rows are not those of `costmodel bench {name}` ({error!r:.100})"
            ) from None
        if section is not None:
            yield replace(section, parts=(*notice, *section.parts))


def _of_another_model(results: Results, model: XgbCostModel | None) -> tuple[str, ...]:
    """A paragraph that says so where results are not of the page's model."""
    used = results["versions"].get("model")
    if used is None or (model is not None and model.hash and model.hash in cut(used).split()):
        return ()
    earlier = model is not None and str(results["date"]) < str(model.card.training.get("date", ""))
    kind = "an earlier model" if earlier else "another model"
    page_of = f"{model.name} {model.hash}" if model else "no model"
    return (f"Measured with {kind}: {cut(used)}; this page is of {page_of}.",)


def _against_torch(name: str, results: Results) -> Section:
    versions = ", ".join(f"{key} {value}" for key, value in results["versions"].items())
    parts = (
        f"{results['device']}, {results['date']}; {versions}. Above 1 is faster.",
        figure(lambda axes: PLOTS["kernels"](axes, results), "speed relative to torch"),
        Table(["", "value"], list(results["summary"].items())),
    )
    return Section(f"Speed against torch: {name}", parts)


def _learning_curves(name: str, results: Results) -> Section | None:
    """Rows that say of which curve they are a point; None without any."""
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for row in results["rows"]:
        if row.get("curve") is not None:
            curves.setdefault(cut(row["curve"]), []).append(row)
    if not curves:
        return None
    points = [row for rows in curves.values() for row in rows]
    columns = [c for c in dict.fromkeys(c for row in points for c in row) if c != "curve"]
    return Section(
        f"Learning curves: {name}",
        (*_curve_figure(curves, columns),
         Table(["curve", *columns],
               [[row["curve"], *(row.get(c) for c in columns)] for row in points])),
    )  # fmt: skip


def _curve_figure(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], columns: Sequence[str]
) -> tuple[Figure, ...]:
    """Speed kept over what was trained on; nothing where the columns do not tell which is which."""
    along = next((c for c in ("workloads", "rows") if c in columns), None)
    kept = [c for c in columns if c.endswith("geomean_pct")]
    if along is None or not kept:
        return ()

    def draw(axes: Any) -> None:
        for curve, rows in curves.items():
            for column in kept:
                points = sorted((r[along], r[column]) for r in rows if along in r and column in r)
                label = f"{curve} {column.removesuffix('_geomean_pct')}"
                axes.plot(*zip(*points, strict=True), "o-", label=label)
        axes.set_xlabel(f"{along} trained on")
        axes.set_ylabel("speed kept, geometric mean, %")

    return (figure(draw, f"speed kept over {along} trained on"),)


_RESULTS = {
    "kernels": _against_torch,
    "ablation": _learning_curves,
}
