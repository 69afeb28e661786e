"""Kernels of the benchmark ``autotune``: all that its calls reach, and a random draw of them."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autotune_keys import KEYS

SEED, DRAWN, CAP, SHORTEST, KEYED = 0, 32, 400, 4, 8
LIST = Path(__file__).with_name("autotune_kernels.csv")


@dataclass(frozen=True)
class Listed:
    """A kernel that the calls reach, and how many configurations Triton's own tuner would time."""

    kernel: str
    case: str
    configs: int


def read_list(path: Path = LIST) -> tuple[list[Listed], list[Listed]]:
    """Return all kernels of the list, and the drawn ones in the order of the draw."""
    with path.open() as file:
        lines = list(csv.DictReader(file))
    found = [Listed(line["kernel"], line["case"], int(line["configs"])) for line in lines]
    places = {int(line["drawn"]): kernel for kernel, line in zip(found, lines, strict=True)}
    return found, [places[place] for place in sorted(places) if place > 0]


def draw(
    kernels: Iterable[Listed], seed: int = SEED, number: int = DRAWN, cap: int = CAP
) -> list[Listed]:
    """Draw kernels in random order; their lists together stay under a cap.

    A kernel is taken if the cap still leaves room for as many of the later kernels as are missing,
    the shortest ones. One kernel of each package comes first, so that no package is left out.
    """
    order = [kernel for kernel in kernels if kernel.configs >= SHORTEST]
    order.sort(key=lambda kernel: kernel.kernel)
    random.Random(seed).shuffle(order)
    first = {kernel.kernel.split(".")[0]: kernel for kernel in reversed(order)}.values()
    order.sort(key=lambda kernel: kernel not in first)
    taken: list[Listed] = []
    for i, kernel in enumerate(order):
        missing = number - len(taken) - 1
        shortest = sorted(other.configs for other in order[i + 1 :])[: max(missing, 0)]
        used = sum(other.configs for other in taken) + kernel.configs + sum(shortest)
        if missing >= 0 and used <= cap:
            taken.append(kernel)
    return taken


def keyed_kernels(drawn: Iterable[Listed]) -> list[Listed]:
    """Return the kernels that are tuned for five keys: the first eight drawn ones in KEYS."""
    return [kernel for kernel in drawn if kernel.case in KEYS][:KEYED]
