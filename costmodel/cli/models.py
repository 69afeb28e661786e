"""``costmodel train`` and ``costmodel evaluate``: make a model from timings, and judge it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from costmodel.cli.common import DEFAULT_TARGET, AsJson, Model, OptionalPath, answer, note
from costmodel.cli.waiting import doing
from costmodel.errors import InvalidInput

if TYPE_CHECKING:
    from costmodel.data.dataset import Dataset
    from costmodel.models import XgbCostModel


def train(
    datasets: Annotated[
        list[Path],
        Argument(
            help="Folders that `costmodel collect` or `costmodel kernels record` wrote: of one "
            "device, or of several that run the same binaries, such as an H100 and an H200."
        ),
    ],
    out: Annotated[Path, Option(help="Folder to save the model in.")],
    name: Annotated[str, Option(help="Name of the model in results.")] = "xgb",
    add_cache: Annotated[
        bool, Option("--add-cache", help="Also learn from what tuning has timed on this machine.")
    ] = False,
    cache_dir: Annotated[
        OptionalPath, Option(help="Like --add-cache, from this cache folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model on datasets and save it; costmodel.use(OUT) then uses it.

    Datasets of kernels make a model of any kernel, which tuning and `kernels explain` can use.
    """
    import costmodel
    from costmodel.data.dataset import Dataset
    from costmodel.data.shards import content_of, require_place

    kinds = {*map(content_of, datasets)}
    if {"dataset", "dataset of kernels"} <= kinds:
        raise InvalidInput("datasets of products and of kernels were given: train each kind alone")
    if "dataset of kernels" in kinds:
        if add_cache or cache_dir:
            raise InvalidInput("--add-cache is for products: use `costmodel kernels record` first")
        require_place(out, "model of kernels")
        _train_kernels(datasets, out, as_json)
        return
    opened = [Dataset.open(path) for path in datasets]
    require_place(out, "model")  # training takes minutes: check before it, not after
    note(f"training on {', '.join(map(str, datasets))}: this takes minutes")
    doing("training")
    model = costmodel.train(*opened, name=name, add_cache=cache_dir or add_cache)
    model.save(out)
    card = model.card.training
    counts = {name: card[name] for name in ("rows", "workloads")}
    counts |= {f"left out: {reason}": count for reason, count in card["dropped"].items()}
    if used := card.get("from_use"):
        counts |= {f"of these from use: {name}": used[name] for name in ("rows", "workloads")}
        counts |= {f"left out of use: {why}": count for why, count in used["dropped"].items()}
    answer(
        as_json,
        {"path": str(out), "name": model.name, "hash": model.hash, "training": card},
        (f"model {model.name} ({model.hash}) in {out}", ["trained on", ""], counts.items()),
    )


def _train_kernels(datasets: Sequence[Path], out: Path, as_json: bool) -> None:
    from joblib import cpu_count

    from costmodel.autotune.dataset import KernelDataset
    from costmodel.autotune.model import KernelModel

    dataset = KernelDataset.read_all(datasets)
    note(f"training on {len(dataset.rows)} rows of kernels: this takes minutes")
    doing("training")
    model = KernelModel.train(dataset, nthread=cpu_count())
    model.save(out)
    counts = model.card.trained_on
    answer(
        as_json,
        {"path": str(out), "training": counts},
        (f"model of kernels in {out}", ["trained on", ""], counts.items()),
    )


def evaluate(
    data: Annotated[
        OptionalPath, Option(help="Dataset with eval rows; default: the H100's.")
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Show how much speed each model's ranking keeps on held-out workloads; needs no GPU.

    With --json the figures are `speed_kept`, and again under the older name `regret`.
    """
    from costmodel.evaluation.evaluate import evaluate as judge
    from costmodel.reports.comparison import compared_models, kept_table

    dataset, chosen = judged(data, model)
    if chosen is None:
        note(f"no model is shipped for {dataset.target.device.name}: baselines only")
    models, reason = compared_models(dataset, chosen)
    if reason:
        note(f"left out: {reason}")
    doing(f"judging {len(models)} models")
    entries = judge(dataset, models, dataset.target)
    where = f"{entries[0]['workloads']} workloads of {dataset.path}"
    answer(
        as_json,
        entries,
        (f"speed kept on {where}, %: geometric mean (worst)", *kept_table(entries)),
    )


def judged(data: OptionalPath, model: OptionalPath) -> tuple[Dataset, XgbCostModel | None]:
    """Return the dataset to judge by, and the model: from the path, else the shipped one."""
    from costmodel.data.dataset import Dataset
    from costmodel.models import load, model_directory
    from costmodel.tuning.shipped import recording

    dataset = Dataset.open(data or recording(DEFAULT_TARGET, sample=False))
    directory = model or model_directory(dataset.target)
    return dataset, load(directory) if directory else None
