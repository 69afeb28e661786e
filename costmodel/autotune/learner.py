"""Decides which configuration of a list is tried next, and when the best is good enough.

The logarithm of the latency is modelled as a sum of three terms: the level of the list; the
prediction of the model of all kernels, times a factor near :data:`_TRUST`; and a smooth function of
the configuration, a Gaussian process. Timings of the same kernel under other keys inform that
function too, the more so the nearer the sizes of the arguments are. Three hyperparameters are not
known: how smooth the function is, how large it is, and how much keys have in common. A few values
of each are combined, weighed by how well they explain the timings. The configuration with the
greatest expected improvement is tried next.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.arrays import Floats

STOP = 0.002
"""Expected improvement, as a share of the latency, below which nothing more is tried."""

_SIZES = (0.15, 0.3, 0.6)  # of the function, in the logarithm of the latency
_LENGTHS = (1.5, 3.0, 6.0)  # of the function's changes: steps of a factor of two, or of one stage
_SHARED = (0.3, 0.6, 0.9)  # correlation of keys, however far apart
_AT_ODDS = 4.0  # logarithm of how much less likely other keys may make some hyperparameters
_OCTAVES = 3.0  # between sizes of arguments, over which keys share less by a factor of e
_TRUST, _DOUBT = 0.5, 0.4  # factor of the model's prediction, and its standard deviation
_NOISE = 0.01  # of a timing
_FAILED = 0.5  # a failure counts as slower than the slowest by this, in the logarithm
_LEVEL = 1.0  # standard deviation of a list's level, once roughly known
_FIRST = 4  # first picks, far apart, before anything is known
OTHERS, _ROWS = 8, 160  # limits: other keys that are used, and all their timings


@dataclass(frozen=True)
class Tried:
    """Timings of a kernel under one key, and predictions.

    Attributes:
        configs: parsed names of configurations (:func:`costmodel.autotune.store.config_name`).
        predicted: log(latency) by the model, up to a constant, float64 [n].
        latency_us: of those that were timed, float64 [n]; NaN: not timed, or it does not work.
        sizes: arguments as in :class:`costmodel.autotune.store.KernelEntry`.
    """

    configs: Sequence[Mapping[str, Any]]
    predicted: Floats
    latency_us: Floats
    sizes: Mapping[str, Any]


class Learner:
    """Picks the configuration of one list to try next.

    Args:
        now: the list; configurations with a known latency count as tried.
        others: the same kernel under other keys.
        least: how many are tried at least, whatever is expected of them.
    """

    def __init__(self, now: Tried, others: Sequence[Tried] = (), *, least: int = 0) -> None:
        others = [each for each in others if np.isfinite(each.latency_us).any()]
        others = sorted(others, key=lambda each: distance(each.sizes, now.sizes))[:OTHERS]
        self._count = len(now.configs)
        self.least = max(least, min(3, self._count) if others else _least(self._count))
        self._tried: dict[int, float] = {}
        for row in np.flatnonzero(np.isfinite(now.latency_us)):
            self.tell(int(row), now.latency_us[row])
        if self.least >= self._count:  # all are tried, whatever is learned
            self._first = np.argsort(now.predicted, kind="stable").tolist()
            return
        self._condition(now, others)
        self._first = [] if others or self._tried else self._apart(_FIRST)

    def tell(self, row: int, latency_us: float = math.nan) -> None:
        """Note a timing in us; NaN if there is none, since the configuration does not work."""
        self._tried[row] = math.log(latency_us) if latency_us > 0 else math.nan
        self.least += not latency_us > 0 and self.least < self._count - 1  # a failure tells little

    def next(self, pending: Collection[int] = ()) -> int | None:
        """Return the row to try next; None: nothing more, except what is pending.

        Args:
            pending: rows that were begun; they are assumed to turn out as expected.
        """
        begun = {*self._tried, *pending}
        if (first := next((row for row in self._first if row not in begun), None)) is not None:
            return first
        left = [row for row in range(self._count) if row not in begun]
        if not left:
            return None
        gain = self._gain(pending)
        row = max(left, key=gain.__getitem__)
        return row if gain[row] >= STOP or len(begun) < self.least else None

    def needs(self, pending: Collection[int]) -> bool:
        """Return True if the pending rows are worth waiting for."""
        if not pending or len(self._tried) < self.least:
            return bool(pending)
        return self.gain(pending) >= STOP

    def gain(self, pending: Collection[int]) -> float:
        """Return the largest expected improvement of a pending row; infinite if all are tried."""
        if self.least >= self._count:
            return math.inf
        return float(self._gain(())[list(pending)].max(initial=0.0))

    # --- The Gaussian process ---------------------------------------------------------------------

    def _condition(self, now: Tried, others: Sequence[Tried]) -> None:
        """Set the list's mean and covariance given the other keys, for each hyperparameter set."""
        keys = [now, *others]
        rows = [[*range(self._count)], *(_fastest(x, _ROWS // len(others)) for x in others)]
        configs = [key.configs[i] for key, part in zip(keys, rows) for i in part]
        place = np.repeat(np.arange(len(keys)), [*map(len, rows)])
        model = np.concatenate([_centred(key.predicted)[part] for key, part in zip(keys, rows)])
        far = squared_distances(encode(configs))
        apart = np.array([[distance(a.sizes, b.sizes) for b in keys] for a in keys])
        off = [
            np.log(key.latency_us[part]) - _TRUST * _centred(key.predicted)[part]
            for key, part in zip(others, rows[1:])
        ]
        found = np.concatenate([np.empty(0), *map(_centred, off)])
        same = place[:, None] == place
        level = _LEVEL**2 * same
        doubt = _DOUBT**2 * np.outer(model, model)
        own, seen = slice(0, self._count), slice(self._count, None)
        smooth = [matern(far / length**2) for length in _LENGTHS]
        parts = []
        for shared in _SHARED if others else (1.0,):
            common = shared + (0.97 - shared) * np.exp(-apart / _OCTAVES)
            common = np.where(same, 1.0, common[place][:, place])
            for size, near in itertools.product(_SIZES, smooth):
                whole = ((size**2 * near + doubt) * common + level)[None]
                told, shift, evidence = _given(whole[:, own, seen], whole[:, seen, seen], found)
                parts.append((shift[0], whole[0, own, own] - told[0].T @ told[0], evidence[0]))
        shifts, covariances, evidences = zip(*parts)
        self._mean = _TRUST * model[own] + np.stack(shifts)
        self._covariance, self._evidence = np.stack(covariances), np.array(evidences)
        # The other keys decide which hyperparameters are likely, but this key may be unlike them.
        self._evidence = np.maximum(self._evidence, self._evidence.max() - _AT_ODDS)

    def _gain(self, pending: Collection[int]) -> Floats:
        """Return each row's expected improvement over the best timing, as a share of its latency.

        Before anything works: how much faster the row is expected to be than the list's slowest.
        """
        tried, found = [*self._tried], np.array([*self._tried.values()])
        works = np.isfinite(found)
        slowest = found[works].max() if works.any() else 0.0
        found = np.where(works, found, slowest + _FAILED)
        seen = [*tried, *pending]  # pending rows change no mean, but reduce what is unknown
        off = found - self._mean[:, tried]
        level = off[:, works].mean(axis=1, keepdims=True) if works.any() else 0.0
        told, shift, evidence = _given(
            self._covariance[:, :, seen], self._covariance[:, seen][:, :, seen], off - level
        )
        weight = np.exp(self._evidence + evidence - (self._evidence + evidence).max())
        weight /= weight.sum()
        mean = self._mean + level + shift
        if not works.any():
            expected = weight @ mean
            return expected.max() - expected + STOP
        left = np.diagonal(self._covariance, axis1=1, axis2=2) - (told * told).sum(axis=1)
        return weight @ _improvement(found.min() - mean, np.sqrt(np.maximum(left, 1e-10)))

    def _apart(self, count: int) -> list[int]:
        """Return promising rows, each of them least known given those before it."""
        mean = self._mean[0]
        covariance = self._covariance[len(_LENGTHS) // 2 + len(_LENGTHS)] - _LEVEL**2
        picked: list[int] = []
        for _ in range(min(count, self._count)):
            unknown = covariance.diagonal()
            if picked:
                between = covariance[:, picked]
                known = covariance[np.ix_(picked, picked)] + _NOISE**2 * np.eye(len(picked))
                told = np.linalg.solve(known, between.T)
                unknown = unknown - np.einsum("ij,ji->i", between, told)
            bound = mean - np.sqrt(np.maximum(unknown, 0)) * bool(picked)
            bound[picked] = math.inf
            picked.append(int(bound.argmin()))
        return picked


def _least(count: int) -> int:
    """Return how many of a list are tried at least, if its kernel is new."""
    return min(math.ceil(0.75 * count), max(10, math.ceil(count / 3)))


def _given(between: Floats, known: Floats, off: Floats) -> tuple[Floats, Floats, Floats]:
    """Condition a Gaussian process on what was found, for each of h hyperparameter sets.

    Args:
        between, known: covariance of all rows with the known ones, [h, n, k], and of the known
            ones, [h, k, k].
        off: values found for the first of the known rows, minus their mean.

    Returns:
        (told, shift, evidence): ``told.T @ told`` is to be subtracted from the covariance, [h, k,
        n]; ``shift`` is to be added to the mean, [h, n]; logarithm of the likelihood, [h].
    """
    factor = np.linalg.cholesky(known + _NOISE**2 * np.eye(known.shape[-1]))
    told = np.linalg.solve(factor, between.transpose(0, 2, 1))
    count = off.shape[-1]
    factor = factor[:, :count, :count]
    off = np.broadcast_to(off, (len(known), count))
    error = np.linalg.solve(factor, off[:, :, None])[:, :, 0]
    evidence = -np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
    shift = np.einsum("hki,hk->hi", told[:, :count], error)
    return told, shift, evidence - 0.5 * (error * error).sum(axis=1)


def _improvement(lead: Floats, spread: Floats) -> Floats:
    """Return the expected value of the part above zero of a normal variable."""
    scaled = lead / spread
    below = 0.5 * (1 + np.vectorize(math.erf)(scaled / math.sqrt(2)))
    return lead * below + spread * np.exp(-0.5 * scaled**2) / math.sqrt(2 * math.pi)


# --- Distances ------------------------------------------------------------------------------------


def encode(configs: Sequence[Mapping[str, Any]]) -> Floats:
    """Return coordinates of configurations, [n, d]: a factor of two or a stage is a step of one."""
    columns = []
    for name in sorted({name for config in configs for name in config["kwargs"]}):
        columns += _columns([config["kwargs"].get(name) for config in configs])
    columns += _columns([config["num_warps"] for config in configs])
    columns += _columns([config["maxnreg"] or 256 for config in configs])
    for name in ("num_stages", "num_ctas"):
        columns += [np.array([float(config[name] or 0) for config in configs])]
    return np.stack(columns, axis=1)


def _columns(values: Sequence[Any]) -> list[Floats]:
    """Return the coordinates of one argument: logarithms of numbers, else a 0 or 1 per value."""
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x in values):
        return [np.array([math.log2(x) if x > 0 else -1 - math.log2(1 - x) for x in values])]
    texts = [str(value) for value in values]
    return [np.array([float(text == each) for text in texts]) for each in sorted(set(texts))]


def squared_distances(points: Floats) -> Floats:
    """Return the squared distance of each pair of rows, [n, n]."""
    lengths = (points**2).sum(axis=1)
    return np.maximum(lengths[:, None] + lengths - 2 * points @ points.T, 0)


def matern(squared: Floats) -> Floats:
    """Return the Matérn 5/2 correlation at squared distances."""
    far = np.sqrt(5 * squared)
    return (1 + far + far**2 / 3) * np.exp(-far)


def distance(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Return how far the sizes of two calls are apart: octaves of the argument that differs most.

    Another data type, or another bool, counts as two octaves.
    """
    apart = [0.0]
    for name in first.keys() & second.keys():
        match first[name], second[name]:
            case [str(dtype), list(shape)], [str(other), list(other_shape)]:
                apart += [_octaves(math.prod(shape), math.prod(other_shape))]
                apart += [2.0 * (dtype != other)]
            case bool(a), bool(b):
                apart += [2.0 * (a != b)]
            case int(a), int(b):
                apart += [_octaves(a, b)]
    return max(apart)


def _octaves(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1)) - math.log2(max(b, 1)))


def _centred(values: Floats) -> Floats:
    return values - values.mean()


def _fastest(tried: Tried, count: int) -> list[int]:
    """Return the rows of the fastest timings, at most ``count``."""
    timed = np.isfinite(tried.latency_us).sum()  # NaN comes last
    return np.argsort(tried.latency_us, kind="stable")[: min(count, timed)].tolist()
