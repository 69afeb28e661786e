"""Training: from a dataset to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.models.table import TrainingTable
from costmodel.models.validate import calibrate
from costmodel.models.xgb import DEFAULTS, XgbCostModel, XgbParams

if TYPE_CHECKING:
    from costmodel.data.dataset import Dataset


def train(
    data: Dataset | TrainingTable,
    *,
    params: XgbParams = DEFAULTS,
    name: str = "xgb",
    nthread: int = 2,
    calibrated: bool = True,
) -> XgbCostModel:
    """Train a model on the training workloads of a dataset.

    ``train(dataset).save(path)``, then ``costmodel.use(path)`` is all that it takes to use it.

    Args:
        data: a dataset, whose rows of role ``train`` are used, or a table.
        name: what results call the model.
        nthread: threads of the training; prediction uses one.
        calibrated: measure also what its rankings keep, which takes as long again.

    Raises:
        InvalidInput: no row of status ok.
    """
    table = data if isinstance(data, TrainingTable) else TrainingTable.from_dataset(data)
    model = XgbCostModel(params, name=name, nthread=nthread).fit(table)
    if calibrated:
        model.confidence_ = calibrate(table, params, nthread=nthread)
    return model
