"""What a binary depends on: its key says exactly that, and the compiler is told what is true."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import families
from costmodel.gemm.space import SearchSpace, grid
from costmodel.gemm.specialize import (
    Repacking,
    artifact_key,
    compile_many,
    constants,
    kernel_hash,
    source,
    specialize,
)
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Target, Toolchain

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
LARGE = Workload.dense(4096, 4096, 4096)
KERNELS = tuple(families())


# --- the key -------------------------------------------------------------------------------------


@pytest.mark.fault("B16")
@given(st.sampled_from(grid()), st.sampled_from(grid()), st.booleans(), st.booleans())
def test_keys_are_equal_only_for_equal_specializations(
    one: GemmConfig, other: GemmConfig, near: bool, even: bool
) -> None:
    if near:
        other = replace(one, num_stages=other.num_stages, maxnreg=other.maxnreg)
    workload = replace(LARGE, k=4096 if even else 4095)
    specs = specialize(LARGE, one), specialize(workload, other)
    assert (artifact_key(specs[0], H100) == artifact_key(specs[1], H100)) == (specs[0] == specs[1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_sizes_and_launch_arguments_make_no_difference(kernel: str) -> None:
    config = GemmConfig(kernel, 64, 64, 64)
    key = artifact_key(specialize(LARGE, config), H100)
    for w, c in (
        (replace(LARGE, m=1, n=64, k=128), config),
        (LARGE, replace(config, group_m=1)),
        (LARGE, replace(config, group_m=16)),
    ):
        assert artifact_key(specialize(w, c), H100) == key
    two, four = (replace(config, split_k=s) for s in (2, 4))
    assert specialize(LARGE, two) == specialize(LARGE, four) != specialize(LARGE, config)


@pytest.mark.fault("B01")
def test_a_tail_of_k_matters_to_a_masked_kernel_only() -> None:
    for kernel in KERNELS:
        config = GemmConfig(kernel, 64, 64, 64)
        even, odd = (specialize(replace(LARGE, k=k), config) for k in (4096, 4097))
        assert (even != odd) == families()[kernel].is_masked


def test_everything_in_the_class_of_code_matters() -> None:
    changes = (
        {"dtype": "bfloat16"}, {"out_dtype": "float16"}, {"dtype": "float32"},
        {"dtype": "float32", "tf32": True},
        {"a_layout": "col"}, {"b_layout": "col"}, {"c_layout": "strided"}, {"a_align": 8},
        {"b_align": 4}, {"c_align": 4}, {"wide": True}, {"bias": True}, {"activation": "relu"},
    )  # fmt: skip
    assert {name for change in changes for name in change} == {*CodeClass.__dataclass_fields__}
    config = GemmConfig("pointer", 64, 64, 64)
    base = replace(LARGE.code, out_dtype="float32")
    codes = [base, *(replace(base, **c) for c in changes)]
    keys = {artifact_key(specialize(replace(LARGE, code=c), config), H100) for c in codes}
    assert len(keys) == len(changes) + 1


@pytest.mark.fault("B16")
def test_architecture_and_toolchain_matter_and_the_card_does_not() -> None:
    spec = specialize(LARGE, GemmConfig("pointer", 64, 64, 64))
    tools = H100.toolchain
    different = [
        H100,
        Target.named("a100-sxm", tools),
        Target.named("b200-sxm", tools),
        Target(H100.device, Toolchain("3.7.0", tools.ptxas)),
        Target(H100.device, Toolchain(tools.triton, "12.9")),
    ]
    assert len({artifact_key(spec, t) for t in different}) == len(different)
    for name in ("h100-pcie", "h200-sxm"):
        assert artifact_key(spec, Target.named(name, tools)) == artifact_key(spec, H100)


def test_specializations_of_the_grid_bake_in_what_is_not_passed() -> None:
    """A kernel has either a pointer or a descriptor of C, and no workspace without a split."""
    for config in SearchSpace.of(LARGE, H100).configs[::7]:
        baked = constants(specialize(LARGE, config))
        if config.kernel == "warp_specialized":
            assert ("b2_desc" in baked) == (not config.block_n & (config.block_n - 1))
            continue
        assert ("c_ptr" in baked) == (config.kernel != "pointer")
        if config.kernel != "tma_persistent":
            assert ("arrivals_ptr" in baked) == (config.split_k == 1)


# --- the code of the kernels ---------------------------------------------------------------------

_HASHES = """
import json, sys
for folder in sys.argv[1:]:
    for name in [n for n in sys.modules if n.split(".")[0] == "costmodel"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    import costmodel.gemm.specialize as code
    assert code.__file__.startswith(folder)
    names = ("pointer", "tma", "tma_persistent", "warp_specialized")
    print(json.dumps({n: code.kernel_hash(n) for n in names}))
    sys.path.pop(0)
"""

SPLIT_LOOP = "    for start in tl.range(0, SPLIT_K, BATCH):\n"
EDITS = {
    # name: file, old, new, kernels that change
    "a comment": ("pointer.py", "    if SPLIT:\n", "    if SPLIT:  # a comment\n", ""),
    "a docstring": ("tma.py", "over the given steps of BLOCK_K.", "over some steps.", ""),
    "blank lines": ("epilogue.py", SPLIT_LOOP, "\n\n" + SPLIT_LOOP, ""),
    "another way to write it": ("pointer.py", "tl.static_assert(BLOCK_M >= 16 and BLOCK_N >= 16",
                                "tl.static_assert((BLOCK_M >= 16) and (BLOCK_N >= 0x10)", ""),
    "a function of another file": ("check.py", "atol + rtol", "rtol + atol", ""),
    "an operator": ("pointer.py", "first_step + per_split", "first_step - per_split", "pointer"),
    "a callee": ("tma.py", "acc = tl.dot(a, b, acc, ", "acc += tl.dot(a, b, None, ",
                 "tma tma_persistent"),
    "a callee of another file": ("epilogue.py", SPLIT_LOOP, 
                                 SPLIT_LOOP.replace("SPLIT_K", "SPLIT_K + 0"), "pointer tma"),
    "a callee of a callee": ("epilogue.py", "x < 0", "x <= 0",
                             "pointer tma tma_persistent warp_specialized"),
    "the copy before a kernel": ("repack.py", "other=0.0", "other=1.0",
                                 "tma tma_persistent warp_specialized"),
    "a function that is handed over": ("warp_specialized.py", "filled += 1", "filled += 2",
                                       "warp_specialized"),
    "its callee": ("warp_specialized.py", "desc, [col, row]", "desc, [row, col]",
                   "warp_specialized"),
    "a default": ("epilogue.py", "acc, bias_ptr, offs_n, N, ACTIVATION: tl.constexpr",
                  "acc, bias_ptr, offs_n, N, ACTIVATION: tl.constexpr = 'none'",
                  "pointer tma tma_persistent"),
}  # fmt: skip


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Hashes of the kernels after each edit, from copies of the package."""
    root = tmp_path_factory.mktemp("copies")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        copy_package = importlib.import_module("faulty_kernels").copy_package
    folders: Sequence[Path] = [
        copy_package(root / f"{i}", {f"kernels/{file}": (old, new)})
        for i, (file, old, new, _) in enumerate(EDITS.values())
    ]
    command = [sys.executable, "-c", _HASHES, *map(str, folders)]
    done = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(EDITS, lines, strict=True))


@pytest.mark.fault("B16")
@pytest.mark.parametrize("edit", EDITS)
def test_a_hash_changes_with_the_code_and_with_nothing_else(
    edit: str, hashes: dict[str, dict[str, str]]
) -> None:
    edited = {name for *_, names in EDITS.values() for name in names.split()}
    changed = {name for name in edited if hashes[edit][name] != kernel_hash(name)}
    assert changed == set(EDITS[edit][3].split())


def test_hashes_tell_the_kernels_apart() -> None:
    assert len({kernel_hash(name) for name in KERNELS}) == len(KERNELS)


# --- what the compiler is told -------------------------------------------------------------------


def copies(text: str) -> set[tuple[str, int]]:
    """(instruction, bytes) of the asynchronous copies and plain global loads in some PTX."""
    found = {
        ("cp.async", int(n, 0))
        for n in re.findall(r"cp\.async\.c[ag]\S* .*?, (0x[\da-f]+|\d+)", text)
    }
    for vector, bits in re.findall(r"ld\.global(?:\.[\w:]+)*?(\.v\d)?\.[bsuf](\d+)", text):
        found.add(("ld.global", int(vector[2:] or 1) * int(bits) // 8))
    return found


@pytest.mark.fault("B19")
@pytest.mark.slow
def test_alignment_decides_how_memory_is_read(tmp_path: Path) -> None:
    target = Target.named("h100-sxm")
    config = GemmConfig("pointer", 64, 64, 32, 4, 3)
    cases = {
        "aligned": Workload.dense(4096, 4096, 4096),
        "rows of 1000": Workload.dense(1000, 1000, 1000),  # 16 bytes, but not 16 elements
        "rows of 8 bytes": Workload.dense(1004, 1004, 1004),
        "rows of 4 bytes": Workload.dense(1002, 1002, 1002),
        "rows of 2 bytes": Workload.dense(1001, 1001, 1001),
        "columns": Workload.dense(1000, 1000, 1000, a_layout="col", b_layout="col"),
    }
    specs = {specialize(w, config): name for name, w in cases.items()}
    assert len(specs) == len(cases)
    ptx = {
        specs[a.spec]: (tmp_path / f"{a.key}.ptx").read_text()
        for a in compile_many(specs, target, n_jobs=2, dump=tmp_path)
    }
    wide = {("cp.async", 16)}
    assert copies(ptx["aligned"]) == wide
    assert copies(ptx["rows of 1000"]) == wide
    assert copies(ptx["columns"]) == wide
    assert copies(ptx["rows of 8 bytes"]) == {("cp.async", 8)}
    assert copies(ptx["rows of 4 bytes"]) == {("cp.async", 4)}
    assert copies(ptx["rows of 2 bytes"]) == {("ld.global", 2)}
    assert "st.global.v4.b32" in ptx["aligned"]
    assert "st.global.v4.b32" in ptx["rows of 1000"]
    assert "st.global.b16" in ptx["rows of 2 bytes"]


@pytest.mark.fault("B19")
@pytest.mark.slow
def test_copied_operands_promise_nothing_about_the_sizes(tmp_path: Path) -> None:
    """Their rows are padded, M, N and K are not: stores of C go by what C promises."""
    config = GemmConfig("tma", 64, 64, 64, 4, 3, repack=True)
    cases = {
        "st.global.b16": Workload.dense(1001, 1001, 1001),
        "st.global.b32": Workload.dense(1002, 1002, 1001),
    }
    specs = {specialize(w, config): store for store, w in cases.items()}
    for artifact in compile_many(specs, Target.named("h100-sxm"), n_jobs=2, dump=tmp_path):
        ptx = (tmp_path / f"{artifact.key}.ptx").read_text()
        stores = set(re.findall(r"st\.global(?:\.v\d)?\.b\d+", ptx))
        assert stores == {specs[artifact.spec]}


@pytest.mark.slow
@pytest.mark.parametrize("b_unit", [True, False, None])
@pytest.mark.parametrize("a_unit", [True, False, None])
def test_copies_are_stored_in_whole_vectors(a_unit: bool | None, b_unit: bool | None) -> None:
    """Of A, B or both, whose rows are contiguous or not: 8 elements a store, nothing beside."""
    import triton
    from triton.backends.compiler import GPUTarget

    if a_unit is None and b_unit is None:
        return
    src, options = source(Repacking("float16", a_unit, b_unit))
    compiled = triton.compile(src, target=GPUTarget("cuda", 90, 32), options=options)
    stores = re.findall(r"st\.global\S*", compiled.asm["ptx"])
    assert set(stores) == {"st.global.v4.b32"}
    assert len(stores) == 4 * ((a_unit is not None) + (b_unit is not None))
