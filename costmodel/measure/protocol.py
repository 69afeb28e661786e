"""The way a latency is measured: part of every dataset, since only equal ways can be compared."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from costmodel.errors import InvalidInput

ByKind = tuple[tuple[str, float], ...]
"""A number for each kind of operand."""


@dataclass(frozen=True)
class TimingProtocol:
    """The settings of a measurement.

    A replay is one CUDA graph of several launches, each on operands of its own. Before each
    replay the L2 cache is filled with other data, by reading, outside the timed region; a first
    replay, which sends the graph to the device, is not timed. Timed work is queued while the device
    is busy, so that the device never waits for the host. The latency is the time of a replay,
    divided by its number of launches.

    Attributes:
        cache: ``cold``, as above.
        repeats: timed replays of a configuration; their quantiles are kept.
        replay_us: intended time of a replay, which sets its number of launches. Replays that turn
            out far shorter are made again. Starting a replay costs some 4 us.
        max_launches: at most this many launches in a replay.
        idle: rest before a replay, as a multiple of its time, where one launch takes over
            ``idle_from_us``: large products without rests make the card throttle.
        early_factor: a configuration this many times slower than the best of its workload so far
            is replayed once only.
        stop_factor: one this many times slower is not replayed at all (``too_slow``).
        rtol, atol, growth: a result is ``wrong_result`` if it differs from an IEEE float32
            reference, with operands of unit variance, by more than
            ``atol * sqrt(k) + growth * k + rtol * |ref|``. Per kind of operand; ``16-bit>float32``
            is a float32 result of 16-bit operands. Errors grow as sqrt(k) if a result is rounded
            once at the end, or if its operands are rounded (TF32). Float32 sums are rounded at each
            step, those of the reference too: the number of steps and the sums both grow with k.
        limit_s: wall seconds before the timing process is killed (``timeout``).
        version: of the procedure itself; raised when a change to it changes what is measured.
    """

    cache: Literal["cold"] = "cold"
    repeats: int = 5
    replay_us: float = 250.0
    max_launches: int = 40
    idle: float = 0.5
    idle_from_us: float = 100.0
    early_factor: float = 1.5
    stop_factor: float = 30.0
    rtol: ByKind = (
        ("bfloat16", 1.6e-2), ("float16", 2e-3), ("16-bit>float32", 2e-4), ("tf32", 2e-3),
        ("float32", 1e-5),
    )  # fmt: skip
    atol: ByKind = (
        ("bfloat16", 8e-3), ("float16", 1e-3), ("16-bit>float32", 2e-4), ("tf32", 3e-3),
        ("float32", 2e-6),
    )  # fmt: skip
    growth: ByKind = (("16-bit>float32", 2.0**-20), ("float32", 2.0**-22))
    limit_s: float = 60.0
    version: int = 3

    def __post_init__(self) -> None:
        if min(self.repeats, self.max_launches, self.replay_us, self.limit_s) <= 0:
            raise InvalidInput(f"repeats, launches, times and limits must be positive: {self}")

    def launches(self, about_us: float) -> int:
        """Return how many launches of this latency a replay has: 2 at least, unless one is long."""
        # ``about_us`` includes the start of a launch, which short ones pay only once in a replay.
        wanted = round(self.replay_us / max(about_us - 2.0, 2.0))
        least = 2 if about_us < 4 * self.replay_us else 1
        return min(max(wanted, least), self.max_launches)

    def tolerance(self, precision: str, terms: int) -> tuple[float, float]:
        """Return (atol, rtol), for which ``|out - ref| <= atol + rtol * |ref|`` must hold.

        Args:
            precision: a name in ``rtol`` and ``atol``.
            terms: number of products that are added up in one element.
        """
        k = max(terms, 1)
        atol = dict(self.atol)[precision] * k**0.5 + dict(self.growth).get(precision, 0.0) * k
        return atol, dict(self.rtol)[precision]

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready, as datasets keep it."""
        data = asdict(self)
        return data | {name: dict(getattr(self, name)) for name in ("rtol", "atol", "growth")}
