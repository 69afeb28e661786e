"""Any PTX text, and what is none: what must not change the features, and what is refused."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_texts import HAND, MMA, kernel

from costmodel.compile.ptx import PTX_FEATURES, extract, normalize, ptx_hash
from costmodel.errors import InvalidInput

# --- The schema --------------------------------------------------------------------------------


@pytest.mark.fault("B34")
def test_names_are_unique_and_every_value_is_a_float() -> None:
    assert len(set(PTX_FEATURES)) == len(PTX_FEATURES)
    for text in HAND.values():
        features = extract(text)
        assert tuple(features) == PTX_FEATURES
        assert all(type(value) is float for value in features.values())


@pytest.mark.fault("B34")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("// nothing\n", id="only a comment"),
        pytest.param("\x7fELF\x02\x01\x01\x00", id="a binary"),
        pytest.param("def kernel(x):\n    return {x: 1}\n", id="Python"),
        pytest.param("define void @k() {\nentry:\n  ret void\n}\n", id="LLVM"),
        pytest.param(".version 8.7\n.target sm_90\n", id="a header alone"),
        pytest.param(".func helper()\n{\nret;\n}\n", id="no kernel"),
        pytest.param(".visible .entry k()", id="no body"),
        pytest.param(kernel("}"), id="a brace too many"),
    ],
)
def test_what_is_no_ptx_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"PTX"):
        extract(text)


@pytest.mark.fault("B34")
@given(cut=st.floats(0, 1, exclude_max=True), name=st.sampled_from(list(HAND)))
def test_ptx_that_breaks_off_is_refused(cut: float, name: str) -> None:
    program = normalize(HAND[name])
    with pytest.raises(InvalidInput, match=r"PTX"):
        extract(program[: int(cut * (len(program) - 2))])


@pytest.mark.fault("B34", "B40")
@given(st.text() | st.text(alphabet='.;:{}@%$"/*\n regbaxn0') | st.text().map(kernel))
def test_any_text_gives_every_feature_or_invalid_input(text: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", ptx_hash(text))
    try:
        features = extract(text)
    except InvalidInput:
        return
    assert tuple(features) == PTX_FEATURES


# --- What must not change anything --------------------------------------------------------------

NOISE = st.sampled_from(
    [
        "// a comment; with { braces } and .entry\n",
        "/* bra L; */",
        "\t \n\n",
        '\n\t.loc\t1 17 23                         // "kernel.py":17:23 @[ a.py:1:2 ]\n',
        "\n\t.loc\t2 43 17, function_name $L__info_string0, inlined_at 1 97 25\n",
        '\n\t.file\t3 "/home/some one/x//y/kernel;{.py"\n',
        '\n\t.file\t4 "/home/*/kernel.py"\n',
        "\n$L__tmp99:\n",
        "\n\t.section\t.debug_info\n\t{\n.b8 47 // DW_AT_comp_dir }\n.b32 .debug_abbrev\n\t}\n",
    ]
)


@given(data=st.data(), name=st.sampled_from(list(HAND)))
def test_debug_information_comments_and_blanks_change_nothing(
    data: st.DataObject, name: str
) -> None:
    lines = normalize(HAND[name]).splitlines()
    places = data.draw(st.lists(st.tuples(st.integers(0, len(lines) - 1), NOISE), max_size=20))
    for place, noise in places:
        lines[place] = noise + lines[place]
    noisy = "\n".join(lines) + "\n"
    assert normalize(noisy) == normalize(HAND[name])
    assert ptx_hash(noisy) == ptx_hash(HAND[name])
    assert extract(noisy) == extract(HAND[name])


@given(seed=st.randoms(use_true_random=False), name=st.sampled_from(list(HAND)))
def test_width_of_blanks_changes_nothing(seed, name: str) -> None:  # type: ignore[no-untyped-def]
    lines = normalize(HAND[name]).splitlines(keepends=True)
    text = "".join(
        line.replace(" ", seed.choice([" ", "\t", "  ", " \t", " /* x */ "])) for line in lines
    )
    assert ptx_hash(text) == ptx_hash(HAND[name])


def test_the_path_that_it_was_compiled_in_changes_nothing() -> None:
    moved = HAND["sm_80"].replace("/somewhere/else", "/another/place").replace("DW_TAG", "OTHER")
    assert moved != HAND["sm_80"]
    assert ptx_hash(moved) == ptx_hash(HAND["sm_80"])


def test_another_program_has_another_hash() -> None:
    texts = [*HAND.values(), *(t.replace("%r5", "%r6") for t in HAND.values())]
    assert len({ptx_hash(t) for t in texts}) == len(texts)


STRAIGHT = [
    line
    for text in HAND.values()
    for line in normalize(text).splitlines()
    if re.match(r"(@!?%\w+ )?(?!bra|ret)[a-z]", line) and line.endswith(";")
]


@given(body=st.lists(st.sampled_from(STRAIGHT), max_size=30), looped=st.booleans())
def test_counts_add_up(body: list[str], looped: bool) -> None:
    """A body repeated counts twice, in a loop and outside of one."""

    def counts(times: int) -> dict[str, float]:
        repeated = "\n".join(body * times)
        # One mma makes the loop a main loop, whatever the body holds.
        return extract(kernel(f"L:\n{MMA}\n{repeated}\n@%p1 bra L;" if looped else repeated))

    none, once, twice = counts(0), counts(1), counts(2)
    for name in PTX_FEATURES:
        assert twice[name] - once[name] == once[name] - none[name], name


# --- Speed --------------------------------------------------------------------------------------


def test_a_large_kernel_takes_milliseconds() -> None:
    body = "\n".join(f"\t.loc\t1 {i} 0   // x.py:{i}:0\n\t{STRAIGHT[i % 60]}" for i in range(1500))
    text = kernel(f"L:\n{MMA}\n{body}\n@%p1 bra L;")
    best_s = min(_seconds(text) for _ in range(5))
    # 3,000 lines take 4 to 8 ms; the limit leaves room for a loaded machine.
    assert best_s < 0.1


def _seconds(text: str) -> float:
    start = time.thread_time()
    extract(text)
    return time.thread_time() - start
