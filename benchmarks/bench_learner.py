"""Share of a list that the learner times, and speed kept: a replay of recorded lists; no GPU.

Two groups of kernels judge. The shipped model has seen nothing of those of role eval. Those of role
train ("modules left out") are each predicted by a model without their module; the learner's
constants were chosen on these. Lists of 16 configurations and more count. Cold means that nothing
is known of a kernel. From the fifth key on means that earlier keys have been replayed before, in
orders drawn by seeds. A configuration that does not work counts as timed. One with the same binary
as an earlier one does not, since the tuner times a binary once. Writes ``learner-<target>.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from common import Results, Row, at_exit_code, count, note, versions
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier

from costmodel.autotune.dataset import KernelDataset
from costmodel.autotune.learner import Learner, Tried, encode
from costmodel.autotune.model import HEADS, KERNELS, KernelModel, KernelTable

Floats = NDArray[np.float64]

LEAST = 16  # configurations
KEYS = 4  # of a kernel that are replayed first and do not count
NEAR = 0.98  # of the best's speed
_TIMES = ("latency_us", "p10_us", "p90_us")

JUDGES = {"eval": "judges", "train": "modules left out"}
SEARCHES = (
    ("the learner", "before", 1),
    ("the same, 15 workers", "before", 15),
    ("as if all were compiled", "after", 1),
    ("without a model", "alone", 1),
)
"""Name, head of the model, and how many configurations are compiled at once."""

RIVALS = ("without a model", "in random order", "a random forest")
FEWER = 90
GOALS = {
    "cold": {"timed_pct": 45.0, "kept_pct": 99.3, "worst_pct": 95.0},
    "from the fifth key on": {"timed_pct": 20.0, "kept_pct": 99.5, "worst_pct": 96.0},
}
"""The most of a list that is timed, and the least speed that is kept (mean and worst), in %."""


@dataclass(frozen=True)
class Recorded:
    """One list of a dataset.

    Attributes:
        judge: "judges", or "modules left out".
        configs: parsed names.
        latency_us: NaN if a configuration does not work.
        binary: numbers, the same for configurations whose binary is the same.
        sizes: arguments.
        predicted: by each head; "alone" holds zeros, as if there were no model.
    """

    judge: str
    kernel: str
    name: str
    configs: list[dict[str, Any]]
    latency_us: Floats
    binary: NDArray[np.intp]
    sizes: dict[str, Any]
    predicted: dict[str, Floats]

    def kept(self, order: Sequence[int]) -> Floats:
        """Return, after each timing of an order, the share of the best speed that is found."""
        found = np.where(np.isnan(self.latency_us), math.inf, self.latency_us)[[*order]]
        best: Floats = np.minimum.accumulate(found)
        return np.nanmin(self.latency_us) / best


@dataclass(frozen=True)
class Replay:
    """One replay of a list.

    Attributes:
        order: what was timed.
        end: number of timings after which the search ends. A search in random order or by a forest
            ends where the learner does.
    """

    recorded: Recorded
    order: list[int]
    end: int

    @property
    def kept(self) -> float:
        return max(float(self.recorded.kept(self.order[: self.end])[-1]), 0.01)

    def timed(self, tried: int) -> int:
        """Return how many binaries are timed for the first so many of the order."""
        return len({*self.recorded.binary[self.order[:tried]]})

    @property
    def needed(self) -> int:
        """Timings until one is within 2 % of the best; if none is, those of the whole list."""
        near = first_near(self.recorded.kept(self.order))
        return self.timed(near) if near else len({*self.recorded.binary})

    def tried(self, head: str) -> Tried:
        """Return what the learner is told of this list for another key of the kernel."""
        latency = np.full(len(self.recorded.configs), np.nan)
        latency[self.order] = self.recorded.latency_us[self.order]
        return Tried(
            self.recorded.configs, self.recorded.predicted[head], latency, self.recorded.sizes
        )


def first_near(kept: Floats) -> int:
    """Count the timings until one is within 2 % of the best; 0 if none is."""
    near = np.flatnonzero(kept >= NEAR)
    return int(near[0]) + 1 if len(near) else 0


# --- Searches -------------------------------------------------------------------------------------


def learn(recorded: Recorded, others: Sequence[Tried], head: str, workers: int) -> Replay:
    """Replay a list as the first call tunes it, with so many binaries compiled at once."""
    latency, pending, order = recorded.latency_us, list[int](), list[int]()
    nothing = np.full(len(latency), np.nan)
    learner = Learner(
        Tried(recorded.configs, recorded.predicted[head], nothing, recorded.sizes), others
    )
    while True:
        while len(pending) < workers and (row := learner.next(pending)) is not None:
            pending.append(row)
        if not learner.needs(pending):
            return Replay(recorded, order, len(order))
        order.append(pending.pop(0))
        learner.tell(order[-1], latency[order[-1]])


def series(lists: Sequence[Recorded], head: str, workers: int) -> list[Replay]:
    """Replay lists of one kernel, each with what those before it have timed."""
    done: list[Replay] = []
    for recorded in lists:
        done.append(learn(recorded, [replay.tried(head) for replay in done], head, workers))
    return done


def at_random(recorded: Recorded, seed: int, end: int = 0) -> list[int]:
    """Return a random order of the whole list."""
    return [int(row) for row in np.random.default_rng(seed).permutation(len(recorded.configs))]


def by_forest(recorded: Recorded, seed: int, end: int) -> list[int]:
    """Return the order of a likelihood-free optimization (LFBO) by a random forest.

    The first five configurations are random. The next is always the one that a classifier most
    surely puts into the fastest third; faster ones weigh more in its training. The search ends
    within 2 % of the best, but not before ``end``.
    """
    order, points = at_random(recorded, seed), encode(recorded.configs)
    for n in range(5, len(order)):
        done, left = order[:n], order[n:]
        if n >= end and first_near(recorded.kept(done)):
            return done
        cost = np.log(recorded.latency_us[done])
        cost[np.isnan(cost)] = np.nanmax(cost, initial=0) + 1
        gain = np.maximum(np.quantile(cost, 1 / 3) - cost, 0)
        good = np.flatnonzero(gain)
        if len(good):
            forest = RandomForestClassifier(20, random_state=seed)
            weight = np.append(gain[good] / gain[good].mean(), np.ones(n))
            label = np.repeat([1, 0], [len(good), n])
            forest.fit(points[[*(done[i] for i in good), *done]], label, weight)
            chance = forest.predict_proba(points[left])[:, 1]
            order[n:] = [left[i] for i in np.argsort(-chance, kind="stable")]
    return order


# --- Figures --------------------------------------------------------------------------------------


def figures(replays: Sequence[Replay]) -> Row:
    """Return shares in % and numbers of timings, as means over replays."""
    kept = np.array([replay.kept for replay in replays])
    share = [replay.timed(replay.end) / len(replay.recorded.configs) for replay in replays]
    return {
        "lists": len({replay.recorded.name for replay in replays}),
        "kernels": len({replay.recorded.kernel for replay in replays}),
        "replays": len(replays),
        "timed_pct": round(100 * float(np.mean(share)), 1),
        "kept_pct": round(100 * float(np.exp(np.log(kept).mean())), 2),
        "worst_pct": round(100 * float(kept.min()), 1),
        "under_95_pct_of_replays": round(100 * float(np.mean(kept < 0.95)), 2),
        "to_within_2_pct": round(float(np.mean([replay.needed for replay in replays])), 2),
    }


def needed(replays: Sequence[Replay]) -> dict[str, float]:
    """Return the timings to within 2 % of each list, as means over its replays."""
    found = defaultdict(list)
    for replay in replays:
        found[replay.recorded.name].append(replay.needed)
    return {name: float(np.mean(each)) for name, each in found.items()}


class Study:
    """Replays of all lists.

    Args:
        seeds: the number of orders of keys, and of random orders. Modules left out get a quarter
            of them. Forests take long, and get a fifth of these.
        map_: the built-in ``map``, or that of a pool.
    """

    def __init__(
        self, lists: Sequence[Recorded], seeds: int, map_: Callable[..., Iterator[Any]] = map
    ) -> None:
        self._lists, self._map = lists, map_
        self._seeds = {"judges": seeds, "modules left out": -(-seeds // 4)}

    def rows(self) -> Iterator[Row]:
        """Yield a row for each judge, start and search."""
        for judge in dict.fromkeys(recorded.judge for recorded in self._lists):
            lists = [recorded for recorded in self._lists if recorded.judge == judge]
            yield from self._rows_of(judge, "cold", [[recorded] for recorded in lists], 0)
            by_kernel = defaultdict(list)
            for recorded in lists:
                by_kernel[recorded.kernel].append(recorded)
            orders = [
                [own[i] for i in np.random.default_rng(seed).permutation(len(own))]
                for own in by_kernel.values() if len(own) > KEYS
                for seed in self._of(judge)
            ]  # fmt: skip
            if orders:
                yield from self._rows_of(judge, "from the fifth key on", orders, KEYS)

    def _of(self, judge: str) -> range:
        return range(1, self._seeds[judge] + 1)

    def _rows_of(
        self, judge: str, start: str, orders: Sequence[list[Recorded]], known: int
    ) -> Iterator[Row]:
        every = {}
        for name, head, workers in SEARCHES:
            found = self._map(partial(series, head=head, workers=workers), orders, chunksize=4)
            every[name] = [replay for each in found for replay in each[known:]]
        ends = {r.recorded.name: (r.recorded, r.end) for r in every["the learner"]}
        seeds = self._of(judge)
        for name, search, some in (
            ("in random order", at_random, seeds),
            ("a random forest", by_forest, seeds[: -(-len(seeds) // 5)]),
        ):
            jobs = [(*each, seed) for each in ends.values() for seed in some]
            lists, end, chosen = zip(*jobs, strict=True)
            found = self._map(search, lists, chosen, end, chunksize=8)
            every[name] = [*map(Replay, lists, found, end)]
        ours = needed(every["the learner"])
        for name, replays in every.items():
            row = {"judge": judge, "start": start, "search": name, **figures(replays)}
            theirs = needed(replays)
            no_more = np.mean([ours[each] <= theirs[each] for each in ours])
            yield row | {"learner_needs_no_more_pct": round(100 * float(no_more), 1)}


# --- The lists of a dataset -----------------------------------------------------------------------


def recorded_lists(dataset: KernelDataset, model: KernelModel, nthread: int) -> list[Recorded]:
    """Return the lists that count, those of the judges first."""
    rows = dataset.rows
    heads = {head: np.full(rows.num_rows, np.nan) for head in HEADS}
    for head, found in heads.items():
        for role in {*rows["role"].to_pylist()}:
            table = KernelTable.of(dataset, head, role)
            found[table.row] = (
                table.unseen(KERNELS, nthread) if role == "train"
                else model.trees[head].forest.predict(table.values)
            )  # fmt: skip
    texts = ("list", "kernel", "role", "config", "arguments", "status")
    text = {name: np.asarray(rows[name]) for name in texts}
    ok = text["status"] == "ok"
    latency = np.where(ok, np.asarray(rows["latency_us"], np.float64), np.nan)
    # Rows with the same binary have the same three timings; other rows differ in one of them.
    same = np.stack([np.asarray(rows[name], np.float64) for name in _TIMES], axis=1)
    same[~ok] = -1.0 - np.flatnonzero(~ok)[:, None]
    binary = np.unique(same, axis=0, return_inverse=True)[1].ravel()
    lists = []
    for name in dict.fromkeys(text["list"]):
        own = np.flatnonzero(text["list"] == name)
        if len(own) < LEAST or ok[own].sum() < 2:
            continue
        predicted = {head: _filled(found[own]) for head, found in heads.items()}
        lists.append(
            Recorded(
                JUDGES[text["role"][own[0]]],
                text["kernel"][own[0]],
                name,
                [json.loads(config) for config in text["config"][own]],
                latency[own],
                binary[own],
                json.loads(text["arguments"][own[0]]),
                predicted | {"alone": np.zeros(len(own))},
            )
        )
    return sorted(lists, key=lambda recorded: recorded.judge)


def _filled(predicted: Floats) -> Floats:
    """Return predictions; a row without one gets the mean of the others."""
    known = ~np.isnan(predicted)
    return np.where(known, predicted, predicted[known].mean())


def summarize(rows: list[Row]) -> Row:
    """Return the learner's figures on the judges, with its goals."""
    found: Row = {}
    for row in rows:
        if (row["judge"], row["search"]) == ("judges", "the learner"):
            for name, goal in GOALS[row["start"]].items():
                found[f"{row['start']}: {name} (goal {goal})"] = row[name]
    for row in rows:
        if row["judge"] == "judges" and row["start"] == "cold" and row["search"] in RIVALS:
            found[f"no more timings than {row['search']}, % of lists (goal {FEWER})"] = row[
                "learner_needs_no_more_pct"
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    checkout = Path(__file__).parent.parent
    default = checkout / "datasets" / "kernels-h200-sxm"
    parser.add_argument("--dataset", type=Path, default=default, help="a dataset of kernels")
    shipped = checkout / "models" / "kernels-h200-sxm"
    parser.add_argument("--model", type=Path, default=shipped, help="what predicts the judges")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seeds", type=count, default=20)
    parser.add_argument("--nthread", type=count, default=2)
    args = parser.parse_args()
    dataset = KernelDataset.read(args.dataset)
    target = dataset.identity.target
    lists = recorded_lists(dataset, KernelModel.load(args.model), args.nthread)
    software = versions(target, **{"scikit-learn": sklearn.__version__})
    results = Results("learner", target, args.results, software, summarize)
    with ProcessPoolExecutor(args.nthread) as pool:
        for row in Study(lists, args.seeds, pool.map).rows():
            note(f"{row['judge']}, {row['start']}, {row['search']}: {row['timed_pct']} % timed, "
                 f"{row['kept_pct']} % kept")  # fmt: skip
            results.add(row)
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
