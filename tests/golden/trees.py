"""Grows the golden trees with the installed XGBoost: a UBJ file, and what it predicts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import xgboost

rows = (np.arange(120, dtype=np.float32).reshape(40, 3) * 7919 % 101) / 101
names = ["column0", "column1", "column2"]
data = xgboost.DMatrix(rows, label=rows.sum(1), feature_names=names, nthread=1)
booster = xgboost.train({"max_depth": 3, "nthread": 1}, data, 2)
stem = Path(__file__).with_name(f"trees-xgboost-{xgboost.__version__}")
Path(f"{stem}.ubj").write_bytes(booster.save_raw("ubj"))
predicted = booster.inplace_predict(rows[:5])
Path(f"{stem}.json").write_text(json.dumps([float(us) for us in predicted]) + "\n")
