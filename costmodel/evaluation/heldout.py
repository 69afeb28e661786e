"""The workloads that a model is judged on, and the rule that keeps them out of training.

A training workload, whatever its m, dtype or layout, must not share its (n, k) with an eval
workload, or come near: both within 2 %. Two disguises of the same product count as well:

- the operand-swapped twin. C^T = B^T A^T is the product with m and n exchanged, so a workload
  whose (m, k) is an eval (n, k) is that eval layer seen from the other side;
- the same weights read the other way (n and k exchanged), as the backward pass does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.gemm.workload import Workload, kind_options

__all__ = [
    "EVAL_WORKLOADS", "HELD_OUT", "EvalWorkload", "eval_pairs", "eval_workloads", "is_held_out",
    "is_ragged",
]  # fmt: skip

HELD_OUT = "held out for evaluation"
"""Why a workload is not trained on of which :func:`is_held_out` tells."""

_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class EvalWorkload:
    """A line of the eval list: where the shape comes from, and its sizes."""

    name: str
    m: int
    n: int
    k: int


_LAYERS = (
    ("llama3-8b o_proj", 4096, 4096),
    ("gpt3 qkv", 12288, 4096),
    ("gpt3 down", 4096, 12288),
    ("llama3-8b qkv", 6144, 4096),
    ("llama3-8b gate_up", 28672, 4096),
    ("llama3-8b down", 4096, 14336),
    ("tall-k", 1024, 8192),
    ("llama3-70b tp8 o_proj", 8192, 1024),
    ("square block", 2048, 2048),
    ("deepseek-v3 up", 7168, 2048),
)
_SINGLE = (
    EvalWorkload("square 512", 512, 512, 512),
    EvalWorkload("square 1024", 1024, 1024, 1024),
    EvalWorkload("square 2048", 2048, 2048, 2048),
    EvalWorkload("square 8192", 8192, 8192, 8192),
    EvalWorkload("long-k", 128, 128, 16384),
    EvalWorkload("bert ffn", 384, 768, 3072),
    EvalWorkload("near-square ragged", 1008, 1008, 1024),
    EvalWorkload("wave tail", 3072, 768, 8192),
)
_RAGGED_OR_EXTREME = (
    EvalWorkload("ragged all", 1000, 1000, 1000),
    EvalWorkload("odd small", 333, 777, 555),
    EvalWorkload("odd large", 4097, 4095, 4093),
    EvalWorkload("gpt2 lm_head", 2048, 50257, 768),
    EvalWorkload("vit-l token", 197, 3072, 1024),
    EvalWorkload("im2col first layer", 12544, 64, 147),
    EvalWorkload("k tiny", 8192, 1024, 27),
    EvalWorkload("deepseek-v3 q_b", 512, 24576, 1536),
    EvalWorkload("llama3 lm_head decode", 4, 128256, 4096),
    EvalWorkload("very long k", 64, 64, 65536),
)

EVAL_WORKLOADS: tuple[EvalWorkload, ...] = (
    *(EvalWorkload(name, m, n, k) for name, n, k in _LAYERS for m in (1, 16, 64, 256, 1024, 4096)),
    *_SINGLE,
    *_RAGGED_OR_EXTREME,
)
"""The eval list, in its order; ``benchmarks/eval.csv`` is the same list for other tools."""


def eval_workloads(dtype: str = "float16") -> list[Workload]:
    """The eval list as dense row-major workloads of a kind of operand, see ``gemm.dtypes``."""
    types = kind_options(dtype)
    return [Workload.dense(e.m, e.n, e.k, **types) for e in EVAL_WORKLOADS]


def eval_pairs() -> frozenset[tuple[int, int]]:
    """The (n, k) that are held out."""
    return frozenset((e.n, e.k) for e in EVAL_WORKLOADS)


def is_held_out(workload: Workload, pairs: Iterable[tuple[int, int]] | None = None) -> bool:
    """Whether a workload must stay out of training data.

    Args:
        pairs: the (n, k) that are held out; those of the eval list by default.
    """
    m, n, k = workload.m, workload.n, workload.k
    disguises = ((n, k), (m, k), (k, n))
    return any(
        _near(side, eval_n) and _near(depth, eval_k)
        for eval_n, eval_k in (eval_pairs() if pairs is None else pairs)
        for side, depth in disguises
    )


def is_ragged(workload: Workload) -> bool:
    """Whether a workload counts as ragged or extreme, not as aligned.

    So are the last ten of the eval list, and all with n, k or a stride not a multiple of 16.
    """
    code = workload.code
    if "strided" in (code.a_layout, code.b_layout, code.c_layout):
        return True
    strides = (
        workload.k if code.a_layout == "row" else workload.m,
        workload.n if code.b_layout == "row" else workload.k,
        workload.n if code.c_layout == "row" else workload.m,
    )
    sizes = (workload.m, workload.n, workload.k)
    return any(x % 16 for x in (workload.n, workload.k, *strides)) or sizes in {
        (e.m, e.n, e.k) for e in _RAGGED_OR_EXTREME
    }


def _near(value: int, eval_value: int) -> bool:
    return abs(value - eval_value) <= _TOLERANCE * eval_value
