"""The models that every table shows side by side, and that table."""

from typing import Any

from costmodel.arrays import Floats
from costmodel.data.candidates import Candidates, CostModel
from costmodel.data.dataset import Dataset
from costmodel.files import Named
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import AnalyticModel, PtxScore, RuleHeuristic, StaticRank, TrainingTable


class ConfigOnly(CostModel):
    """A learned model that is shown no artifacts: it predicts from configurations alone."""

    kind = "learned"
    predicts_latency = True

    def __init__(self, model: CostModel):
        self._model = model
        self.name = f"{model.name} config-only"

    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Floats:
        """Latency in us of each candidate, float64 [n]."""
        return self._model.predict(workload, candidates.without_artifacts(), target)


def compared_models(dataset: Dataset, model: CostModel | None) -> tuple[list[CostModel], str]:
    """The learned model in full and without PTX, and the baselines.

    Args:
        dataset: the static baseline is made of its training rows.
        model: None leaves the learned ones out.

    Returns:
        (models, reason): why one is left out; empty if none is.
    """
    models = [] if model is None else [model, ConfigOnly(model)]
    reason, table = "", TrainingTable.from_dataset(dataset)
    if table.ok.any():
        models.append(StaticRank().fit(table))
    else:
        reason = f"static: {dataset.path} has no training rows to learn it from"
    models += [RuleHeuristic(), AnalyticModel(), PtxScore(), PtxScore.hopper()]
    return models, reason


def kept_table(entries: list[Named]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of what ``evaluate`` found.

    For each k the geometric mean over the workloads and, in brackets, the worst of them.
    """

    def kept(entry: Named, group: str, k: str) -> str:
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
    return columns, rows
