"""Columns of a configuration that a model of any kernel sees.

The columns must mean the same for every kernel. So the constants of a configuration are sorted by
size, and by the side of a tile that they seem to be, not by name. All columns except ``last_wave``
and ``fill`` are logarithms: a sum or difference of them is a product or a quotient, such as the
work of all programs, or per byte.
"""

import json
import re
from collections.abc import Mapping, Sequence
from math import log2
from typing import Any

import numpy as np

from costmodel.arrays import Floats, FloatsByName
from costmodel.autotune.dataset import FEATURES
from costmodel.features.analytic import occupancy
from costmodel.features.concepts import concept_of
from costmodel.hardware.target import Device

BINARY = ("registers", "spill_bytes", "shared_bytes")
"""Columns of the dataset that are known from the binary only, as are those of its PTX."""

BESIDE = " in its list"
"""End of the name of a column that holds the difference from the list's median."""

_ALONE = """num_warps programs blocks scf.for tensor_bytes-programs-num_warps registers fill running
resident_waves ptx_loops ptx_all_instructions ptx_all_mma_flops ptx_loop_mma_flops"""
ALONE = frozenset(_ALONE.split())
"""Columns that the head ``after`` sees as they are too, not only as a difference."""

_SIDES = {"m": "MQT", "n": "NVSD", "k": "KC"}  # first letters of what blocks are named after
_CONSTANTS = "block_0 block_1 block_2 block_3 m n k blocks SPLIT GROUP steps waste"
_BEFORE = """programs+num_warps tensor_bytes-programs tensor_bytes-programs-num_warps
largest_elements-programs largest_elements-programs-num_warps largest_elements-programs-blocks
blocks-num_warps block_0+block_1-num_warps m+n-num_warps blocks+num_stages block_0-block_1
blocks+programs"""
_WORK = """all_instructions loop_instructions all_ld_global_bytes all_st_global_bytes
all_float_arith loop_mma_flops all_barrier all_atomic"""
_AFTER = """registers+num_warps spill_bytes-ptx_all_instructions running+ptx_all_ld_global_bytes
running+ptx_all_cp_async ptx_all_ld_global_bytes-ptx_all_ld_global
ptx_all_st_global_bytes-ptx_all_st_global"""
# The configurations of a list do the same work: ratios give iterations, and instructions of each.
_RATES = """all_instructions-all_ld_global_bytes all_instructions-all_st_global_bytes
all_instructions-all_float_arith all_instructions-all_mma_flops loop_instructions-loop_mma_flops
loop_instructions-loop_cp_async loop_instructions-loop_float_arith loop_mma_flops-loop_cp_async"""


SCALED = "costmodel.scaled.launch.scaled_product"
"""The name under which all kernels of scaled products are tuned."""

_CONFIG = "block_m block_n step splits num_stages num_warps groups parts"
_KERNELS = "pointer tma warps torch"
_CALL = "m n k recipe_a recipe_b fast int8"
_SCALED = """waves-programs waves+steps+step waves+steps+step+block_m+block_n
programs+steps+step+sides programs+block_m+block_n num_stages+step+sides"""


_CONCEPTS = {
    r"(tt|arith|math|scf)\.": "which kernel it is",
    r"grid_|.*programs$": "how many blocks there are",
    r"(block_.|blocks|m|n|k|steps)$": "the shape of the tile",
    r"waste": "padding of the tiles",
    r"\w*waves?|fill": "the tail of the last wave",
    r"running": "blocks and warps that share a multiprocessor",
    r"SPLIT": "splitting k",
    r"GROUP": "traffic, and reuse in L2",
    r"executed": "the instructions outside the main loop",
}


def concept(name: str) -> str:
    """Return the concept of a column, in the words that explanations of products use."""
    first = re.split(r"[+-]", name.removesuffix(BESIDE))[0].removeprefix("ptx_")
    own = (words for pattern, words in _CONCEPTS.items() if re.match(pattern, first))
    return next(own, concept_of(first))


def scaled(columns: Mapping[str, Any], device: Device) -> FloatsByName:
    """Return the columns of a list of scaled products, float64 [n] each."""
    call = dict.fromkeys("mnk", 1) | json.loads(columns["arguments"][0])
    call["int8"] = "int8" in str(call.get("a"))
    configs = [config | config["kwargs"] for config in map(json.loads, columns["config"])]
    found = {x: np.array([float(config.get(x, 1)) for config in configs]) for x in _CONFIG.split()}
    rows, cols, step, splits, *_ = found.values()
    parts = np.maximum(splits, 1)
    programs = np.ceil(call["m"] / rows) * np.ceil(call["n"] / cols) * parts
    waves = programs / device.sm_count
    waves = np.where(splits > 0, np.ceil(waves), waves)  # 0 splits: programs share work evenly
    steps = np.ceil(call["k"] / step / parts)
    found |= {"programs": programs, "waves": waves, "steps": steps, "sides": rows + cols}
    found |= {x: np.full(len(configs), float(call.get(x, 0))) for x in _CALL.split()}
    kernels = np.array([config.get("kernel") for config in configs])
    found |= {x: kernels == x for x in _KERNELS.split()}
    found = {name: _log(values) for name, values in found.items()}
    return found | _sums(_SCALED.split(), found)


def before(columns: Mapping[str, Any], device: Device) -> FloatsByName:
    """Return the columns that are known before a kernel's front end runs, float64 [n] each.

    Args:
        columns: of one list: ``config``, ``arguments`` and the columns of a dataset.
    """
    binary = (*BINARY, "compile_s", "ptx_")
    given = [name for name in FEATURES if not name.startswith(binary) and "." not in name]
    found = {name: _log(columns[name]) for name in given}
    found |= _constants(columns["config"], columns["arguments"])
    found["programs"] = found["grid_0"] + found["grid_1"] + found["grid_2"]
    waves = 2 ** found["programs"] / device.sm_count
    found["last_wave"] = waves / np.ceil(waves)
    return found | _sums(_BEFORE.split(), found)


def after(columns: Mapping[str, Any], device: Device) -> FloatsByName:
    """Return the columns of :func:`before`, and then those that need the binary, float64 [n]."""
    found = before(columns, device)
    made = [name for name in FEATURES if name.startswith((*BINARY, "ptx_")) or "." in name]
    found |= {name: _log(columns[name]) for name in made}
    known = (np.asarray(columns[name], np.float64) for name in (*BINARY, "num_warps"))
    registers, _, shared, warps = known
    blocks = occupancy(registers, shared, warps, device)
    waves = 2 ** found["programs"] / device.sm_count / blocks
    found["occupancy"] = np.log2(blocks)
    found["resident_waves"], found["full_waves"] = np.log2(waves), np.log2(np.ceil(waves))
    found["fill"] = waves / np.ceil(waves)
    found["running"] = np.log2(np.minimum(waves, 1) * blocks * warps)
    # Without loops each instruction is executed once, so the number of executed ones is known.
    once = np.where(found["ptx_loops"] > 0, np.nan, found["ptx_all_instructions"])
    found["executed"] = once + found["programs"] + found["num_warps"]
    found["executed_in_turn"] = once + found["full_waves"] + found["occupancy"] + found["num_warps"]
    rates = [f"ptx_{rate.replace('-', '-ptx_')}" for rate in _RATES.split()]
    times = [f"{rate}{more}" for rate in rates for more in ("+num_warps", "-programs+full_waves")]
    work = [f"ptx_{name}+programs+num_warps" for name in _WORK.split()]
    return found | _sums([*_AFTER.split(), *rates, *times, *work], found)


def _log(values: Any) -> Floats:
    return np.log2(np.maximum(np.asarray(values, np.float64), 0.5))  # 0 gives -1, and 1 gives 0


def _sums(names: Sequence[str], columns: Mapping[str, Floats]) -> FloatsByName:
    """Return sums of columns; the name of each says which columns it adds and subtracts."""
    found = {}
    for name in names:
        terms = re.findall(r"([+-]?)([\w.]+)", name)
        parts = [-columns[x] if sign == "-" else columns[x] for sign, x in terms]
        found[name] = np.sum(parts, axis=0)
    return found


def _constants(configs: Sequence[str], arguments: Sequence[str]) -> FloatsByName:
    """Return columns of the constants: sizes of blocks, and how these divide the call's sizes."""
    found = {name: np.zeros(len(configs)) for name in _CONSTANTS.split()}
    sizes = {
        re.sub(r"_?(DIM|SIZE)$", "", name.upper()): value
        for name, value in json.loads(arguments[0]).items()
        if type(value) is int and value > 0
    }
    for i, config in enumerate(configs):
        blocks = []
        for name, value in json.loads(config)["kwargs"].items():
            if type(value) is not int or value < 1:
                continue
            log, name = log2(value), name.upper()
            if other := re.search("SPLIT|GROUP", name):
                found[other[0]][i] += log
                continue
            blocks.append(log)
            stem = re.sub(r"_?BLOCK_?(SIZE_?)?|TILE_?|^B(?=.)", "", name)
            for side, letters in _SIDES.items():
                found[side][i] += log * stem.startswith(tuple(letters))
            steps = log2(sizes.get(stem, value)) - log
            found["steps" if steps > 0 else "waste"][i] += abs(steps)
        found["blocks"][i] = sum(blocks)
        for place, log in enumerate(sorted(blocks, reverse=True)[:4]):
            found[f"block_{place}"][i] = log
    return found
