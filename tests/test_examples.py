"""Every block of code in README and docs is run or checked; none escapes.

How a block is checked goes by the word after its fence:

- ``python``: run on stand-ins for a GPU, by ``test_python_examples.py``.
- ``bash``: each command is looked up: ``costmodel`` parses it, a script exists and knows its
  options, other programs are those of :data:`PROGRAMS`. What needs no GPU is run, in the slow tier.
- ``text``: output or a drawing; nothing to run.

Any other word, and a block without one, fails.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import ROOT, Block, blocks_of, pages, prose_of, text_of

from costmodel.cli import app

BLOCKS = [block for page in pages() for block in blocks_of(page)]
COMMAND: Any = typer.main.get_command(app)


def parser() -> Any:
    """The command line with commands that do nothing."""
    found: list[Any] = [made := typer.main.get_command(app)]
    while found:
        command = found.pop()
        command.callback = lambda **_: None
        found += getattr(command, "commands", {}).values()
    return made


PARSER = parser()


def blocks(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert [f"{b}: {b.kind!r}" for b in BLOCKS if b.kind not in ("python", "bash", "text")] == []
    fences = sum(text_of(page).count("```") for page in pages())
    assert fences == 2 * len(BLOCKS), "a fence that does not end, or inside a line"


@pytest.mark.parametrize("page", pages())
def test_no_block_is_made_by_indenting(page: str) -> None:
    """Such a block would have no kind; in a list four spaces go on with the point."""
    lines = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE).split("\n")
    assert [b for a, b in pairwise(lines) if not a and b[:4] == "    "] == []


# --- Shell ----------------------------------------------------------------------------------------


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, without comments and settings before it."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        if words:
            yield words


def parse(words: list[str]) -> None:
    """Have the command line take these words; what the command would do is left out."""
    PARSER.main(list(words), standalone_mode=False)


def check_script(file: str, options: list[str]) -> None:
    """A script of the repository exists, and it or what it calls names each option."""
    path = ROOT / file
    assert path.is_file(), f"no {file}"
    text = path.read_text() + (ROOT / "benchmarks" / "common.py").read_text()
    text += (ROOT / ".ci" / "check").read_text()
    assert [o for o in options if o.startswith("--") and f"{o}" not in text] == []


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "costmodel"]:
        return parse(words[2:])
    if words[0] == "-m":
        assert words[1] in ("costmodel.autotune", "pdb", "pip"), words
        return check_pip(words[2:]) if words[1] == "pip" else None
    if words[0].startswith("benchmarks/"):
        return check_script(words[0], words[1:])
    assert words[0] in ("my_kernel.py",), f"no such script: {words}"
    return None


def check_bash(words: list[str]) -> None:
    check_script(words[0], words[1:])


def check_pip(words: list[str]) -> None:
    """No stranger's package, and no Triton that takes the place of the one torch came with."""
    assert words[0] == "install"
    wanted = [word for word in words[1:] if not word.startswith("-")]
    names = {re.split(r"[\[=<>~!]", word)[0] for word in wanted}
    assert "costmodel" not in names, "on PyPI it is another project: write triton-costmodel"
    assert "triton" not in names or ("--no-deps" in words and "triton==3.6.0" in wanted)


def check_wrapped(words: list[str]) -> None:
    """``sbatch --wrap 'costmodel …'``, ``compute-sanitizer … python …``."""
    wrapped = shlex.split(words[-1]) if " " in words[-1] else words
    at = next(i for i, word in enumerate(wrapped) if word in PROGRAMS)
    PROGRAMS[wrapped[at]](wrapped[at + 1 :])


def check_torchrun(words: list[str]) -> None:
    check_python(words[words.index("-m") :])


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "costmodel": parse,
    ".venv/bin/costmodel": parse,
    "python": check_python,
    ".venv/bin/python": check_python,
    "bash": check_bash,
    "pip": check_pip,
    "sbatch": check_wrapped,
    "compute-sanitizer": check_wrapped,
    "torchrun": check_torchrun,
    "grep": lambda words: None,
}


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_each_command_exists_and_knows_its_options(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for words in commands_of(block):
        assert words[0] in PROGRAMS, f"{block}: how is {words[0]!r} to be checked?"
        PROGRAMS[words[0]](words[1:])


@pytest.mark.parametrize(
    "page", [p for p in pages() if p != "CHANGELOG.md"]
)  # which tells what was
def test_commands_in_the_text_exist(page: str) -> None:
    """`costmodel …` in a sentence: its command and options, not what it is called on."""
    names = set(COMMAND.commands)
    for found in re.findall(r"`(?:\.venv/bin/)?costmodel ([a-z-][^`]*)`", prose_of(page)):
        words = [word for word in found.split() if word not in ("-v", "--debug")]
        if words[0].startswith("--"):
            continue
        assert words[0] in names, f"`costmodel {found}`"
        known = options_of(COMMAND.commands[words[0]], words[1:])
        assert {w.split("=")[0] for w in words if w.startswith("--")} <= known, f"`{found}`"


def options_of(command: Any, words: list[str]) -> set[str]:
    """The options that a command knows, or the one below it that the words name."""
    below = getattr(command, "commands", {})
    if words and words[0] in below:
        return options_of(below[words[0]], words[1:])
    return {"--help"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize("page", pages())
def test_no_stranger_is_installed(page: str) -> None:
    for found in re.findall(r"`pip ([^`]*)`", prose_of(page)):
        check_pip(shlex.split(found))


# --- Shell commands that are run ------------------------------------------------------------------

RUN = re.compile(
    r"costmodel (rank|explain|doctor|tune .*--replay|collect .*--(plan|replay|write-worklist)|"
    r"compile [0-9]+ .*--dump|kernels$|cache$|bench$)"
)
"""Commands that need no GPU, and nothing that a GPU has made before."""


def lines_to_run() -> list[tuple[Block, str]]:
    found = []
    for block in blocks("bash"):
        lines = block.text.replace("\\\n", " ").splitlines()
        found += [(block, line.split("  #")[0].strip()) for line in lines]
    return [(block, line) for block, line in found if RUN.search(line)]


@pytest.mark.slow
@pytest.mark.parametrize(("block", "line"), lines_to_run(), ids=str)
def test_what_needs_no_gpu_runs(block: Block, line: str, tmp_path: Path) -> None:
    for name in ("benchmarks", "datasets", "models", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = Path(sys.executable).parent
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(programs)
    line = line.replace("--budget 20s", "--budget 2s")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": paths}
    done = subprocess.run(
        ["bash", "-c", line.replace("PYTHONPATH=tests ", "")], cwd=tmp_path, env=env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block}: {line}\n{done.stderr}"


# --- Names in the text ----------------------------------------------------------------------------

NOW = [page for page in pages() if page != "CHANGELOG.md"]  # which tells what was


def code_of(page: str) -> str:
    """What stands between backquotes in the text of a page, a line each."""
    return "\n".join(re.findall(r"`([^`]*)`", prose_of(page)))


@pytest.mark.parametrize("page", NOW)
def test_names_in_the_text_exist(page: str) -> None:
    for name in set(re.findall(r"(?<![\w./-])costmodel(?:\.\w+)+", code_of(page))):
        module, *rest = name.split(".")
        found = importlib.import_module(module)
        for part in rest:
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)


@pytest.mark.parametrize("page", NOW)
def test_files_in_the_text_exist(page: str) -> None:
    """From the root, or from ``costmodel/``; names in capitals and stars stand for any."""
    names = re.findall(
        r"(?<![\w/*.~$-])[\w.-]+(?:/[\w.-]+)+\.(?:py|sh|md|json|csv|png|toml)\b", code_of(page)
    )
    folders = ROOT, ROOT / "costmodel", ROOT / "docs"
    missing = {n for n in names if not any((folder / n).is_file() for folder in folders)}
    assert {name for name in missing if not re.search(r"[A-Z]{3}", name)} == set()
