"""The figures in sentences of README and docs are those of the results files.

Tables are made of these files (``benchmarks/tables.py``); a sentence is written by hand, and a test
makes the same sentence again. In README no other figure may stand.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
from pages import ROOT, prose_of

from costmodel.evaluation.metrics import geomean


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def summary(name: str) -> Any:
    return results(name)["summary"]


def span(values: list[float], form: str) -> str:
    """The least and the most, such as ``0.6 to 1.0``."""
    return f"{min(values):{form}} to {max(values):{form}}"


# --- README ---------------------------------------------------------------------------------------


def speeds() -> Iterator[str]:
    half, other = summary("kernels-float16-h200-sxm"), summary("kernels-bfloat16-h200-sxm")
    count, worst = half["workloads"], half["default_worst"]
    yield f"Each dot is one of {count} products in float16 on an H200"
    if worst >= 1 and half["default_worst_run"] >= 1:
        yield f"`matmul` was slower than torch for none of the {count}"
    else:
        yield (f"In the slowest of three runs of each, `matmul` was at most "
               f"{100 * (1 - half['default_worst_run']):.1f} % slower than torch")  # fmt: skip
    for dtype, of in (("float16", half), ("bfloat16", other)):
        mean = f"{of['default_geomean']:.2f} times torch's (worst {of['default_worst']:.2f})"
        yield f"| speed of {of['workloads']} products, {dtype} | {mean} |"


def tuning() -> Iterator[str]:
    rows = results("tuning_cost-h200-sxm")["rows"]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "workload"}
    ours, kept = span(columns["topk_s"], ".1f"), span(columns["speed_kept_pct"], ".4g")
    everything, inductor = span(columns["exhaustive_s"], ".0f"), span(columns["inductor_s"], ".1f")
    yield (f"| tuning one product | {ours} s | all configurations: {everything} s; "
           f"Inductor: {inductor} s |")  # fmt: skip
    yield f"| speed kept by timing only 8 | {kept} % |"
    yield f"On an H200 this takes {ours} s, once for each kind of product"
    first_s = summary("first_calls-h200-sxm")["first_of_all_s"]
    yield f"the first of a process takes {first_s:.0f} s"
    timed = summary("tuning_cost-h200-sxm")["exhaustive_timed"]
    yield f"ranks about {round(timed, -2):,.0f} configurations of its own kernels"


def other_kernels() -> Iterator[str]:
    of = summary("autotune-h200-sxm")
    yield (f"| first call of Flash Linear Attention's `chunk_gla` | {of['gla_s']:.0f} s "
           f"| Triton's own tuner: {of['gla_stock_s']:.0f} s |")  # fmt: skip
    yield (f"On an H200 it tuned {of['kernels']} kernels of other packages in "
           f"{of['ours_s']:.0f} s; Triton's own tuner took {of['stock_s']:.0f} s")  # fmt: skip
    yield (f"| tuning {of['kernels']} kernels of three packages | {of['ours_s']:.0f} s "
           f"| Triton's own tuner: {of['stock_s']:.0f} s |")  # fmt: skip


def graphs() -> str:
    """What layers gain in CUDA graphs of up to 128 tokens, in per cent."""
    gains = [
        100 * (row["ratio"] - 1)
        for row in results("model-h200-sxm")["rows"]
        if row["what"] == "graph" and prod(map(int, row["workload"].split("x"))) <= 128
    ]
    return f"{span(gains, '.0f')} %"


def buckets() -> Iterator[str]:
    of = summary("buckets-h200-sxm")
    yield (f"After one extra timing of {of['parts_s']:.1f} s, such a product was "
           f"{of['slower_geomean_pct']:.2f} % slower than if it had been tuned by itself (mean of "
           f"{of['workloads']}; worst {of['slower_worst_pct']:.1f} %)")  # fmt: skip


def rankings() -> Iterator[str]:
    rows = {row["name"]: row["regret"] for row in results("evaluate-h100-sxm")["rows"]}
    ours, rules = rows["xgb-h100-sxm"], rows["nvMatmulHeuristics"]
    yield (f"its first choice among our configurations keeps {rules['1']['geomean_pct']:.0f} % of "
           f"the best speed and its first 8 keep {rules['8']['geomean_pct']:.0f} %. The model's "
           f"first choice keeps {ours['1']['geomean_pct']:.1f} % and its first 8 keep "
           f"{ours['8']['geomean_pct']:.1f} %")  # fmt: skip


def low_precision() -> Iterator[str]:
    of = summary("lowprecision-h200-sxm")
    yield (f"Up to m = 128, fp8 with row-wise scales is {of['row_small_geomean']:.2f} times "
           f"as fast as torch (goal 1.7; worst {of['row_small_worst']:.2f}, goal 1.0)")  # fmt: skip


def readme() -> list[str]:
    gains = (
        f"`replace_linear` gains {graphs()} in CUDA graphs of up to 128 tokens, and nothing beyond"
    )
    found = [speeds, tuning, other_kernels, buckets, rankings, low_precision]
    return [gains, *(sentence for part in found for sentence in part())]


@pytest.mark.parametrize("sentence", readme())
def test_sentences_of_readme_are_those_of_the_results(sentence: str) -> None:
    assert sentence in prose_of("README.md"), f"the results say: {sentence}"


NOT_MEASURED = (
    "about a second",  # first calls: of the table of docs
    "all configurations: 100 %",
)


def test_readme_has_no_figure_beside_these() -> None:
    """A figure is a number with a unit, a percent sign, or "times"."""
    prose = prose_of("README.md")
    for sentence in (*readme(), *NOT_MEASURED):
        prose = prose.replace(sentence, "")
    assert re.findall(r"\b\d[\d.,]* (?:%|times|s|ms|us|TFLOP)(?!\w)", prose) == []


# --- docs -----------------------------------------------------------------------------------------


def of_results() -> Iterator[str]:
    yield from of_buckets()
    yield from of_strategies()
    cost, fewer = summary("tuning_cost-h200-sxm"), summary("tuning_cost-4-workers-h200-sxm")
    yield (f"tuning is {cost['ratio']:.0f} times faster than trying everything and "
           f"{cost['inductor_ratio']:.1f} times faster than Inductor, and its kernels are "
           f"{cost['faster_than_inductor']:.2f} times as fast as Inductor's")  # fmt: skip
    yield f"{fewer['ratio']:.0f} times faster, at {fewer['speed_kept_pct']:.2f} % of the speed"
    yield f"the gain is {graphs()} for up to 128 tokens"
    other = summary("kernels-bfloat16-h200-sxm")
    yield (f"In bfloat16 the mean is {other['default_geomean']:.2f} and the worst "
           f"{other['default_worst']:.2f}")  # fmt: skip
    older = [summary(f"kernels-{dtype}-h100-sxm") for dtype in ("float16", "bfloat16")]
    assert len({f"{of['default_geomean']:.2f}" for of in older}) == 1
    yield (f"it was {older[0]['default_geomean']:.2f} in both types (worst "
           f"{min(of['default_worst'] for of in older):.2f})")  # fmt: skip
    rows = results("kernels-float16-h200-sxm")["rows"]
    rows = [r for r in rows if r["workload"] not in ("4097x4095x4093", "2048x50257x768")]
    bound = [row for row in rows if row["flops_per_byte"] >= 295]
    yield f"Without these two the mean is {geomean([r['default'] for r in rows]):.2f}"
    yield (f"it is {geomean([r['default'] for r in bound]):.3f}: there cuBLAS and Triton are equal "
           f"(the fastest configuration known: "
           f"{geomean([r['triton_best'] for r in bound]):.3f})")  # fmt: skip
    host = {(r["what"], r["pinned"]): r.get("host_ratio") for r in results("model-h200-sxm")["rows"]
            if r["group"] == "host"}  # fmt: skip
    yield f"takes {host['forward and backward', 'triton']:.1f} times torch's host time"


def of_strategies() -> Iterator[str]:
    rows = [r for r in results("strategies-h200-sxm")["rows"] if r["group"] == "eval"]
    ours = sum(row["best"].startswith("model") for row in rows)
    yield f"On the {len(rows)} products the fastest choice is the model's in {ours} cases"
    why = Counter((row["why"] or "").split(",")[0].split(":")[0] for row in rows)
    yield f"keeps more multiprocessors busy ({why['multiprocessors busy']} products"
    yield f"work in its tiles ({why['useful work in the tiles']}, all of them thin)"
    memory = why["MiB of device memory"] + why["MiB asked of L2"]
    yield f"from memory or the L2 cache ({memory}). In {why['alike on paper']} cases both are alike"
    yield f"in the other {why['']} both are the same"


def of_tuning() -> Iterator[str]:
    of = summary("buckets-h200-sxm")
    assert of["over_5_pct"] == 0
    yield f"This takes {of['parts_s']:.1f} s once"
    yield f"Of {of['workloads']} m far from those that were timed, no choice of the bucket was more"


def of_buckets() -> Iterator[str]:
    of = summary("buckets-h200-sxm")
    worst = max(row["first_slower_pct"] for row in results("buckets-h200-sxm")["rows"])
    yield (f"the bucket's choice is {of['slower_geomean_pct']:.2f} % slower. It is more than 5 % "
           f"slower for no m of {of['workloads']} (the worst is "
           f"{of['slower_worst_pct']:.1f} % slower)")  # fmt: skip
    yield (f"By prediction alone the mean is {of['predicted_slower_geomean_pct']:.1f} %, and "
           f"{of['predicted_over_5_pct']} of {of['workloads']} are more than 5 % slower. With the "
           f"winner of the first m the mean is {of['first_slower_geomean_pct']:.1f} %, and "
           f"{of['first_over_5_pct']} of {of['workloads']} are more than 5 % slower, the worst "
           f"{worst:.0f} %")  # fmt: skip


def of_kernels() -> Iterator[str]:
    """Which kernel wins how often; where cuBLAS stays ahead: all workloads under 0.97."""
    rows = results("kernels-float16-h100-sxm")["rows"]
    wins = Counter(row["triton_best_config"].split()[0] for row in rows)
    yield f"thin products with m = 16: {wins['pointer']} of {len(rows)} |"
    yield f"ragged m and n: {wins['tma']} of {len(rows)} |"
    yield f"with copies: {wins['tma_persistent']} of {len(rows)} |"
    yield f"large and compute-bound, {wins['warp_specialized']} of {len(rows)}"
    for device, form in (("h100", "{}: {:.2f}"), ("h200", "{} ({:.2f})")):
        rows = results(f"kernels-float16-{device}-sxm")["rows"]
        behind = [row for row in rows if row["triton_best"] < 0.97]
        for row in behind:
            yield form.format(row["workload"], row["triton_best"])
        yield f"he other {len(rows) - len(behind)} are at 0.97 or more"


def of_model() -> Iterator[str]:
    kept = {row["name"]: row["regret"] for row in results("evaluate-h100-sxm")["rows"]}
    lost = {
        name: [100 - at[k]["geomean_pct"] for k in ("1", "8", "16")] for name, at in kept.items()
    }
    ours, paper, rules = lost["xgb-h100-sxm"], lost["estimate"], lost["heuristic"]
    yield (f"first choice loses {ours[0]:.0f} % of the speed, the best of its first 8 loses "
           f"{ours[1]:.1f} %.")  # fmt: skip
    if paper[2] > ours[0]:
        yield "alone needs more than 16 configurations to be as good as that first choice"
    yield f"Rules of thumb lose {rules[2]:.0f} % with 16"
    rows = {
        r["setting"]: r for r in results("ablation-h100-sxm")["rows"] if r["group"] == "columns"
    }
    names = ("top1_pct", "top8_pct", "kendall_tau")
    least, more = rows["configuration only"], rows["+ analytic"]
    top1, top8, tau = (more[name] - least[name] for name in names)
    yield f"{top1:.0f} points of top-1, {top8:.1f} of top-8, {tau:.2f} of Kendall tau"
    rows = results("transfer-h100-sxm")["rows"]
    new = next(r for r in rows if r["pair"] == "h100-sxm → h200-sxm" and r["trees"] == "as in use")
    yield (f"{new['top1_pct']:.4g} % of its held-out list are kept at 1 and "
           f"{new['top8_pct']:.4g} % at 8")  # fmt: skip
    of = summary("evaluate-h200-sxm")
    yield (f"which learned from both devices, keeps {of['top1_geomean_pct']:.1f} and "
           f"{of['top8_geomean_pct']:.1f}")  # fmt: skip


def of_layers() -> Iterator[str]:
    yield f"{graphs()} in CUDA graphs of up to 128 tokens, nothing beyond"


MADE: dict[str, Callable[[], Iterator[str]]] = {
    "results": of_results,
    "tuning": of_tuning,
    "kernels": of_kernels,
    "model": of_model,
    "in-a-model": of_layers,
}


@pytest.mark.parametrize("page", MADE)
def test_sentences_of_docs_are_those_of_the_results(page: str) -> None:
    prose = prose_of(f"docs/{page}.md")
    assert [sentence for sentence in MADE[page]() if sentence not in prose] == []
