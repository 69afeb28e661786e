"""``costmodel train`` and ``costmodel evaluate``: make a model from timings, and judge it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli import output
from costmodel.cli.options import DEFAULT_TARGET, AsJson

if TYPE_CHECKING:
    from costmodel.data.dataset import Dataset
    from costmodel.models import XgbCostModel


def train(
    datasets: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `costmodel collect` wrote: of one device, or also of others that "
            "run the same binaries (an H200 beside an H100)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to save the model in.")],
    name: Annotated[str, typer.Option(help="What results call the model.")] = "xgb",
    add_cache: Annotated[
        bool, typer.Option("--add-cache", help="Learn also from what tuning has timed here.")
    ] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="As --add-cache, with the winners of this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model on datasets and save it; then costmodel.use(OUT) makes it answer."""
    import costmodel
    from costmodel.data.dataset import Dataset
    from costmodel.data.shards import require_place

    opened = [Dataset.open(path) for path in datasets]
    require_place(out, "model")  # training takes minutes: before it, not after
    model = costmodel.train(*opened, name=name, add_cache=cache_dir or add_cache)
    model.save(out)
    result = {
        "path": str(out),
        "name": model.name,
        "hash": model.hash,
        "training": model.card.training,
    }
    if as_json:
        output.print_json(result)
        return
    card = model.card.training
    rows = [["rows", card["rows"]], ["workloads", card["workloads"]]]
    rows += [[f"left out: {reason}", count] for reason, count in card["dropped"].items()]
    if used := card.get("from_use"):
        rows += [[f"of these from use: {name}", used[name]] for name in ("rows", "workloads")]
        rows += [[f"left out of use: {why}", count] for why, count in used["dropped"].items()]
    output.print_table(f"model {model.name} ({model.hash}) in {out}", ["trained on", ""], rows)


def evaluate(
    data: Annotated[
        Path | None, typer.Option(help="Dataset with eval rows; default: the H100's.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model; default: the shipped one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How much speed each model's ranking keeps on the held-out workloads; needs no GPU.

    With --json it is `speed_kept`, and the same again under its older name `regret`.
    """
    from costmodel.evaluation.evaluate import evaluate as judge
    from costmodel.reports.comparison import compared_models

    dataset, chosen = judged(data, model)
    if chosen is None:
        output.note(f"no model is shipped for {dataset.target.device.name}: baselines only")
    models, reason = compared_models(dataset, chosen)
    if reason:
        output.note(f"left out: {reason}")
    entries = judge(dataset, models, dataset.target)
    if as_json:
        output.print_json(entries)
        return
    _print_kept(f"speed kept on {dataset.path}, %", entries)


def judged(data: Path | None, model: Path | None) -> tuple[Dataset, XgbCostModel | None]:
    """Return the dataset to judge by, and the model: that of a path, else the shipped one."""
    from costmodel.data.dataset import Dataset
    from costmodel.models import load, model_directory
    from costmodel.tuning.shipped import recording

    dataset = Dataset.open(data or recording(DEFAULT_TARGET, sample=False))
    directory = model or model_directory(dataset.target)
    return dataset, load(directory) if directory else None


def _print_kept(title: str, entries: list[dict[str, Any]]) -> None:
    """Print for each k the geometric mean and, in brackets, the worst workload."""

    def kept(entry: dict[str, Any], group: str, k: str) -> str:
        found = entry[group]
        return f"{found[k]['geomean_pct']:.1f} ({found[k]['worst_pct']:.0f})" if found else "–"

    ks = list(entries[0]["regret"])
    columns = ["model", "kind", *(f"top-{k}" for k in ks), "aligned top-1", "ragged top-1",
               "tau", "mape %"]  # fmt: skip
    rows = [
        [e["name"], e["kind"], *(kept(e, "regret", k) for k in ks), kept(e, "aligned", "1"),
         kept(e, "ragged", "1"), e["kendall_tau"], e["mape_pct"]]
        for e in entries
    ]  # fmt: skip
    output.print_table(title, columns, rows)
