"""``costmodel bench``: runs the benchmarks of a checkout, which benchmarks/list.toml describes."""

import subprocess
import sys
import tomllib
from typing import Annotated, Any

from typer import Argument, Exit, Option

from costmodel.cli.common import AsJson, answer
from costmodel.cli.waiting import doing
from costmodel.errors import InvalidInput
from costmodel.tuning.shipped import checkout
from costmodel.validation import closest

PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Options after the name are passed to the benchmark, ``--help`` too."""
# `all` is not a benchmark itself.
_ALL = {"run": "reproduce.py", "answers": "Measures all of them again; --no-gpu what needs none."}


def bench(
    name: Annotated[str, Argument(help="Name of a benchmark; or `all`, or `list`.")] = "list",
    arguments: Annotated[
        list[str] | None, Argument(help="Options of the benchmark, such as --help.")
    ] = None,
    proton: Annotated[
        bool, Option("--proton", help="Record a Proton profile: `bench proton`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a benchmark of the checkout; it writes benchmarks/results/*.json."""
    folder, arguments = checkout("benchmarks"), arguments or []
    listed = tomllib.loads((folder / "list.toml").read_text(encoding="utf-8")) | {"all": _ALL}
    if proton:
        name, arguments = "proton", [*([] if name == "list" else [name]), *arguments]
    if name == "list":
        as_json |= "--json" in arguments
        rows = [[n, e["answers"], e.get("minutes"), _needs(e)] for n, e in listed.items()]
        answer(
            as_json,
            [{"name": n, **e} for n, e in listed.items()],
            ("benchmarks", ["name", "answers", "min", "needs"], rows),
            notes=["options of a benchmark: costmodel bench NAME --help"],
        )
        return
    if name not in listed:
        raise InvalidInput(
            f"no benchmark {name!r}{closest(name, listed)}: see `costmodel bench list`"
        )
    script, *own = (part.format(root=folder.parent) for part in listed[name]["run"].split())
    command = [sys.executable, str(folder / script), *own, *arguments]
    doing("")
    code = subprocess.run(command, stdout=sys.stderr if as_json else None).returncode
    answer(as_json, {"name": name, "exit_code": code})
    raise Exit(code)


def _needs(entry: dict[str, Any]) -> str:
    return ", ".join([*(["a GPU"] if entry.get("gpu") else []), *entry.get("packages", [])])
