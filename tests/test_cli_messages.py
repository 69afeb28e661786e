"""Every command with wrong input: a line that says what was wrong, and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_cli import run
from typer.main import get_command

from costmodel.cli import app, waiting

SIZES = ("64", "64", "64")
NONE = "no/such/place"

# Command: wrong inputs, each with what the message has to name. FILE is a file that holds a text,
# EMPTY an empty folder.
WRONG: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "collect": (
        (("--out", "FILE"), "FILE"), (("--out", "x", "--shapes", NONE), NONE),
        (("--out", "x", "--dtypes", "fp9"), "fp9"), (("--out", "x", "--budget", "soon"), "soon"),
        (("--merge", "--out", "x", "EMPTY"), "EMPTY"),
        (("--out", "x", "--replay", "EMPTY"), "EMPTY"),
    ),
    "compile": (
        ((*SIZES, "--dtype", "fp9"), "fp9"), ((*SIZES, "--dump", "FILE"), "FILE"),
        ((*SIZES, "--target", "h300"), "h300"), ((*SIZES, "--bundle", f"{NONE}/x"), NONE),
        ((*SIZES, "--config", "tma"), "tma"),
    ),
    "train": (
        ((NONE, "--out", "x"), NONE), (("EMPTY", "--out", "x"), "EMPTY"),
        (("FILE", "--out", "x"), "FILE"),
    ),
    "evaluate": (
        (("--data", NONE), NONE), (("--data", "EMPTY"), "EMPTY"), (("--model", "FILE"), "FILE"),
    ),
    "rank": (
        ((*SIZES, "--model", NONE), NONE), (("64", "64", "x"), "'K'"),
        ((*SIZES, "--top", "0"), "--top"),
        ((*SIZES, "--targt", "h100-sxm"), "--target"), (("0", "64", "64"), "M=0"),
    ),
    "tune": (
        ((*SIZES, "--mode", "best"), "best"), ((*SIZES, "--data", "EMPTY"), "EMPTY"),
        (("65", "4097", "4097", "--dtype", "bf16", "--b-layout", "col"),
         "--dtype bfloat16 --b-layout col"),
    ),
    "explain": (((*SIZES, "--against", "tma"), "tma"), ((*SIZES, "99999999"), "99999999")),
    "report": ((("--html", f"{NONE}/x"), NONE), (("--html", "x", "--data", "EMPTY"), "EMPTY")),
    "doctor": ((("--model", NONE), NONE),),
    "bench": ((("kernel",), "kernels"), (("no-such",), "no-such")),
    "cache list": ((("more",), "more"),),
    "cache show": ((("nothing",), "nothing"),),
    "cache verify": ((("--jsn",), "--json"),),
    "cache clear": ((("--ye",), "--yes"),),
    "kernels list": ((("more",), "more"),),
    "kernels show": ((("nothing",), "nothing"),),
    "kernels explain": ((("nothing",), "nothing"),),
    "kernels verify": ((("--jsn",), "--json"),),
    "kernels clear": ((("--ye",), "--yes"),),
    "kernels export": ((("nothing",), "nothing"), (("x", "--format", "xml"), "xml")),
    "kernels record": ((("FILE",), "FILE"), (("x", "--package", "fla"), "fla")),
}  # fmt: skip

# What a message says to do, in one of these words.
ADVICE = re.compile(
    r"expected|name |give|check|choose|leave|run |see |make |use |holds|shows|delete|try|"
    r"did you mean|"
    r"no such (option|command)|not a valid|should be|not one of|unexpected|train it again|another",
    re.IGNORECASE,
)


def commands() -> set[str]:
    """All commands, those of groups with the name of the group."""
    group: Any = get_command(app)
    found = set()
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {each}" for each in inner} if inner else {name}
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "FILE").write_text("a text")
    (tmp_path / "EMPTY").mkdir()
    return tmp_path


def test_every_command_is_tried() -> None:
    assert set(WRONG) == commands()


@pytest.mark.fault("N12")
@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [(command, arguments, named) for command, wrong in WRONG.items() for arguments, named in wrong],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else x,
)
def test_wrong_input_is_named_with_what_to_do(
    here: Path, command: str, arguments: tuple[str, ...], named: str
) -> None:
    result = run(*command.split(), *arguments)
    assert result.exit_code not in (0, None)
    told = " ".join((result.stderr + (result.stdout if command == "doctor" else "")).split())
    told = re.sub(r" ?[│╭╰─╮╯]+ ?", " ", told)
    assert "Traceback" not in told
    assert "Errno" not in told
    assert named in told
    assert ADVICE.search(told), told
    assert sorted(os.listdir(here)) in (["EMPTY", "FILE"], ["EMPTY", "FILE", "cache"])


@pytest.mark.fault("N12")
def test_a_command_that_is_interrupted_says_so_and_fails(here: Path) -> None:
    """Ctrl-C while it imports or works: no traceback, and no success."""
    code = (
        "import sys, costmodel.cli as cli, costmodel.tuning.ranking as r\n"
        "def stopped(*_, **__): raise KeyboardInterrupt\n"
        "r.rank = stopped\n"
        "sys.argv = ['costmodel', 'rank', '64', '64', '64', '--target', 'h100-sxm']\n"
        "cli.main()\n"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "interrupted" in done.stderr


@pytest.mark.fault("N12")
def test_nothing_is_silent_for_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The lines begin after two seconds; here the clock's steps are small."""
    monkeypatch.setattr(waiting, "_STEPS_S", (0.01, 0.01))
    text = ""
    with waiting.told():
        waiting.doing("training")
        deadline = time.monotonic() + 60
        while "... training" not in text and time.monotonic() < deadline:
            time.sleep(0.01)
            text += capfd.readouterr().err
            waiting.doing("training")
    waiting.doing("")
    assert "... training, " in text
