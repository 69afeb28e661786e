"""``costmodel report --html``: how good a model is, on one page; needs no GPU.

The page holds all that it shows: it loads nothing and runs nothing. Predictions are made for it,
from a dataset and a model.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from costmodel.arrays import Floats
from costmodel.data.dataset import Dataset
from costmodel.data.shards import require_file_place, write_file
from costmodel.evaluation.evaluate import Problem, evaluate, problems_of
from costmodel.gemm.specialize import kernel_hashes
from costmodel.models import XgbCostModel
from costmodel.reports import shown
from costmodel.reports.collection import FEATURES_TITLE, Table, tables_of
from costmodel.reports.comparison import compared_models, kept_table
from costmodel.reports.plots import draw_plot, plot_kept, require_matplotlib

_WORST = 15  # workloads
_TOP = 25  # features


class Figure(NamedTuple):
    """A picture within the page: a PNG in base64, and a text that says what it shows."""

    png: str
    alt: str


class Section(NamedTuple):
    """A heading and what stands under it; a text is a paragraph."""

    title: str
    parts: Sequence[str | Table | Figure]


def write_html(path: Path, dataset: Dataset, model: XgbCostModel | None) -> list[str]:
    """Write :func:`html_report` to a file, whole or not at all; return the titles of its sections.

    Raises:
        FileError: the file cannot be written. Others as :func:`html_report`.
    """
    require_file_place(path)  # making the page takes a while
    require_matplotlib()
    text, titles = html_report(dataset, model)
    write_file(path, text.encode())
    return titles


def html_report(dataset: Dataset, model: XgbCostModel | None) -> tuple[str, list[str]]:
    """Return the page, and the titles of its sections.

    Args:
        dataset: a model is judged on its eval rows, if it has any that worked.
        model: the learned model; None shows the baselines alone.

    Raises:
        MissingData: matplotlib is not installed.
    """
    frame = dataset.frame("eval", kernel_hashes=kernel_hashes())
    problems = problems_of(frame, dataset.target.device)
    sections = [_head(dataset, model, problems)]
    if problems:
        sections.append(_kept(dataset, model))
    if problems and model is not None:
        costs = [model.predict(p.workload, p.candidates, dataset.target) for p in problems]
        sections += [_accuracy(problems, costs), _worst(problems, costs)]
    sections += _collection(dataset)
    title = f"costmodel on {dataset.target.device.product}"
    return page(title, sections), [section.title for section in sections]


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the whole document."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.filters["shown"] = shown
    return templates.get_template("page.html").render(title=title, sections=sections)


def figure(draw: Callable[[Any], None], alt: str, size: tuple[float, float] = (8, 4.5)) -> Figure:
    """Draw a plot, as :func:`draw_plot` does, for the page."""
    stream = io.BytesIO()
    draw_plot(draw, stream, size)
    return Figure(base64.b64encode(stream.getvalue()).decode(), alt)


# --- Sections -------------------------------------------------------------------------------------


def _head(dataset: Dataset, model: XgbCostModel | None, problems: Sequence[Problem]) -> Section:
    target = dataset.target
    timed = sum(len(p.candidates) for p in problems)
    facts = {
        "data set": f"{dataset.path.name}, begun {dataset.created}",
        "device": target.device.product,
        "compiled by": f"Triton {target.toolchain.triton}, ptxas {target.toolchain.ptxas}",
        "judged on": f"{len(problems)} held-out workloads, {timed} timed configurations",
        "model": f"{model.name} {model.hash}" if model else "none: baselines only",
    }
    for name, value in (model.card.training if model else {}).items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {shown(count)}" for key, count in value.items())
        facts[f"its training: {name}"] = value
    return Section("What this is of", [Table(["", ""], [*facts.items()])])


def _kept(dataset: Dataset, model: XgbCostModel | None) -> Section:
    """Return the table of all models side by side, as ``costmodel evaluate`` prints it."""
    models, reason = compared_models(dataset, model)
    entries = evaluate(dataset, models, dataset.target)
    text = (
        "The best latency of a workload over the best among the first k of a model, in percent: "
        "geometric mean over the workloads, and the worst of them in brackets."
    )
    plot = figure(partial(plot_kept, entries), "speed kept over k")
    left_out = [f"Left out: {reason}"] if reason else []
    return Section("Speed kept", [text, plot, Table(*kept_table(entries)), *left_out])


def _accuracy(problems: Sequence[Problem], costs: Sequence[Floats]) -> Section:
    measured = np.concatenate([p.latency_us for p in problems])
    predicted = np.concatenate(costs)
    works = np.isfinite(measured) & (predicted > 0)
    measured, predicted = measured[works], predicted[works]
    error = 100 * np.abs(predicted / measured - 1)

    def draw(axes: Any) -> None:
        both = np.concatenate([measured, predicted])
        bins = np.geomspace(both.min(), both.max() * 1.01, 160)
        axes.hist2d(measured, predicted, bins=(bins, bins), norm="log", cmap="viridis", cmin=1)
        axes.plot(bins[[0, -1]], bins[[0, -1]], "k-", linewidth=0.7, label="exact")
        axes.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")

    text = (
        f"{len(measured)} configurations of {len(problems)} workloads; off by "
        f"{np.median(error):.1f} % in the median, {np.mean(error):.1f} % in the mean, "
        f"{np.percentile(error, 95):.1f} % for the worst twentieth. Darker is fewer of them."
    )
    alt = "predicted latency over measured latency, both in logarithms"
    return Section("Predicted and measured", [text, figure(draw, alt, (7, 6))])


def _worst(problems: Sequence[Problem], costs: Sequence[Floats]) -> Section:
    """List the worst workloads: the speed kept, the first choice, and the best configuration."""
    rows: list[list[Any]] = []
    for problem, cost in zip(problems, costs):
        rows.append([str(problem.workload), *(100 * x for x in problem.kept_at(cost, (1, 8)))])
        for i in (np.nanargmin(cost), np.nanargmin(problem.latency_us)):
            config = str(problem.candidates.configs[i])
            rows[-1] += [config, float(cost[i]), float(problem.latency_us[i])]
    rows.sort(key=lambda row: row[1])
    columns = ["workload", "kept of top-1, %", "of top-8, %", "first choice", "predicted us",
               "measured us", "best there is", "predicted us", "measured us"]  # fmt: skip
    text = "The workloads where the first choice keeps least, with that choice and the best."
    return Section("The worst workloads", [text, Table(columns, rows[:_WORST])])


def _collection(dataset: Dataset) -> list[Section]:
    """Return the sections about features, failures and noise."""
    tables = tables_of(dataset)
    columns, rows = tables[FEATURES_TITLE]
    top = rows[:_TOP]

    def draw(axes: Any) -> None:
        values = [row[1:] for row in top]
        picture = axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_yticks(range(len(top)), [row[0] for row in top], fontsize=8)
        axes.set_xticks(range(len(columns) - 1), columns[1:], fontsize=8, rotation=90)
        axes.figure.colorbar(picture, ax=axes)

    text = (
        "Spearman's correlation of a feature with the latency among the configurations of one "
        "workload, mean over the workloads: red goes along with slow, blue with fast."
    )
    sections = [Section(title, [table]) for title, table in tables.items()]
    if rows:
        picture = figure(draw, "correlation of features with latency", (8, 7))
        sections.insert(0, Section("Correlation", [text, picture]))
    return sections
