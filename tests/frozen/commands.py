"""Command lines whose output is frozen. ROOT is the checkout; each runs in an empty folder."""

from __future__ import annotations

H100, H200, A100 = (("--target", name) for name in ("h100-sxm", "h200-sxm", "a100-sxm"))
JSON = ("--json",)
LINEAR = ("--dtype", "bfloat16", "--b-layout", "col")

_RANK = (
    (4096, 4096, 4096, *H100), (1, 4096, 4096, *H100), (197, 3072, 1024, *H200),
    (77, 1408, 2048, *H100, *LINEAR), (2048, 4096, 4096, *A100),
    (1000, 1000, 1000, *H100, "--dtype", "float32"),
    (1000, 1000, 1000, *H100, "--dtype", "float32", "--tf32"),
    (513, 777, 1001, *H100, "--a-layout", "col", "--out-dtype", "float32"),
    (16, 28672, 4096, "--top", "20"), (64, 64, 64, "--target", "b200-sxm", "--top", "2"),
)  # fmt: skip
_EXPLAIN = (
    (4096, 4096, 4096, *H100), (16, 4096, 14336, *H200, "--top", "2"), (64, 4096, 4096, 7, *H100),
    (300, 1000, 4098, *H100, *LINEAR),
    (4096, 4096, 4096, *H100, "--against", "pointer 64x64x32 w4 s3 g8"),
    (1000, 1000, 1000, *A100, "--dtype", "float32"),
)  # fmt: skip
_TUNE = (
    (1024, 4096, 4096, "--replay"), (16, 4096, 14336, "--replay", "--top", "4"),
    (1, 4096, 4096, "--replay", *H200), (64, 4096, 4096, "--replay", "--top", "auto"),
    (1024, 4096, 4096, "--replay", "--mode", "heuristic"),
    (256, 4096, 4096, "--replay", "--mode", "exhaustive"),
    (1024, 4096, 4096, "--replay", "--mode", "predict"), (256, 256, 256),
    (333, 4096, 4096, "--mode", "predict", *H200),
)  # fmt: skip
# Refused with exit code 2: one line for people.
_REFUSED: tuple[tuple[object, ...], ...] = (
    *((command, *size) for command in ("rank", "explain", "tune", "compile")
      for size in ((0, 64, 64), (64, 64, 0), (64, -1, 64), (64, 64), ("a", 64, 64), (1.5, 2, 3))),
    *((command, 64, 64, 64, *option) for command in ("rank", "explain", "tune", "compile")
      for option in (("--dtype", "fp8"), ("--out-dtype", "int8"), ("--a-layout", "colum"),
                     ("--tf32",), ("--target", "h300"), ("--target", "../../etc"), ("--no-such",))),
    ("rank", 64, 64, 64, "--model", "nowhere"), ("rank", 64, 64, 64, "--model", "file"),
    ("rank", 64, 64, 64, "--top", 0), ("rank", 64, 64, 64, "--top", "x"),
    ("explain", 64, 64, 64, 0), ("explain", 64, 64, 64, 10**6),
    ("explain", 64, 64, 64, 2, "--against", "tma 128x256x64 w8 s4 g8"),
    ("explain", 64, 64, 64, "--against", "tma 128x256"),
    ("explain", 64, 64, 64, "--against", "tma 127x256x64 w8 s4 g8"),
    ("tune", 64, 64, 64, "--mode", "fast"), ("tune", 64, 64, 64, "--mode", "never"),
    ("tune", 64, 64, 64, "--top", 0), ("tune", 64, 64, 64, "--top", "many"),
    ("tune", 64, 64, 64, "--data", "nowhere"), ("tune", 64, 64, 64, "--data", "file"),
    ("tune", 1024, 4096, 4096, "--data", "ROOT/datasets/h100-sxm", *H200),
    ("tune", 1025, 4097, 4099, "--replay"), ("tune", 1024, 4096, 4096, "--replay", *A100),
    ("evaluate", "--data", "nowhere"), ("evaluate", "--data", "ROOT"),
    ("evaluate", "--model", "nowhere"), ("evaluate", "--model", "file"),
    ("train",), ("train", "nowhere", "--out", "x"), ("train", "file", "--out", "x"),
    ("train", "ROOT/datasets/h100-sxm"), ("train", "ROOT/datasets/h100-sxm", "--out", "file"),
    ("train", "ROOT/datasets/h100-sxm", "--out", "ROOT/datasets/h100-sxm"),
    ("collect",), ("collect", "--out", "x"), ("collect", "--out", "file"),
    ("collect", "--out", "x", "--shapes", "nowhere.csv"),
    ("collect", "--out", "x", "--shapes", "file"), ("collect", "--out", "x", "--dtypes", "fp8"),
    ("collect", "--out", "x", "--worklist", "nowhere"),
    ("collect", "--out", "x", "--sampler", "model", "--model", "nowhere"),
    ("collect", "--out", "x", "--workloads", 0),
    ("compile", 64, 64, 64, "--config", "tma 512x256x64 w8 s4 g8"),
    ("compile", 64, 64, 64, "--limit", 0), ("compile", 64, 64, 64, "--out", "x"),
    ("compile", 64, 64, 64, "--table", "--dump", "x"), ("compile", 64, 64, 64, "--jobs", 0),
    ("report", "--html", "no/such/report.html"),
    ("report", "--html", "x.html", "--data", "nowhere"),
    ("bench", "no-such"),
    ("cache", "show"), ("cache", "show", "nothing"), ("cache", "no-such"), ("no-such",), ("-x",),
)  # fmt: skip


def texts(arguments: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(map(str, arguments))


ANSWERS: tuple[tuple[str, ...], ...] = tuple(
    map(texts, (
        *(("rank", *a, *JSON) for a in _RANK), *(("explain", *a, *JSON) for a in _EXPLAIN),
        *(("tune", *a, *JSON) for a in _TUNE),
        ("rank", *_RANK[0]), ("-v", "rank", *_RANK[3]), ("rank", *_RANK[4]),
        ("explain", *_EXPLAIN[0]), ("explain", *_EXPLAIN[2]), ("explain", *_EXPLAIN[5]),
        ("tune", *_TUNE[0]), ("tune", *_TUNE[-1]), ("tune", 256, 256, 256), ("bench",),
        ("rank", 64, 4096, 4096, "--target", "H200", "--dtype", "bf16", "--top", 2),
        ("cache", *JSON), ("cache", "list"),
        ("cache", "verify", *JSON), ("cache", "clear", "--yes", *JSON),
        ("compile", 128, 128, 128, *H100, "--limit", 6, "--jobs", 1, *JSON),
        ("evaluate", *JSON), ("evaluate", *JSON, "--data", "ROOT/datasets/h200-sxm"),
    )),
)  # fmt: skip
REFUSED: tuple[tuple[str, ...], ...] = tuple(map(texts, _REFUSED))
