"""The command line: each command parses, calls the library, prints.

People get tables on stdout and progress on stderr; with ``--json`` stdout holds one JSON document
and nothing else. What costmodel raises on purpose is one line on stderr and exit code 2.
"""

from __future__ import annotations

import errno
import io
import logging
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from costmodel.cli import caching, collecting, explaining, modelling, tuning, upkeep
from costmodel.errors import CostModelError
from costmodel.support.untrusted import one_line, printable

__all__ = ["app", "main"]

_MOST_CHARACTERS = 400


class _Commands(TyperGroup):
    """Turns the errors and warnings of the library into lines for people."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the work, the one of groups of commands too."""
        last = ("cache", "doctor")
        return [*(name for name in super().list_commands(ctx) if name not in last), *last]

    def invoke(self, ctx: Any) -> Any:  # a click.Context, of typer's own copy since 0.29
        with warnings.catch_warnings():
            warnings.simplefilter("default", RuntimeWarning)
            warnings.showwarning = lambda message, *_: _tell("warning", message)
            try:
                with _log_lines(logging.INFO if ctx.params["verbose"] else logging.WARNING):
                    return super().invoke(ctx)
            except CostModelError as error:
                if ctx.params["debug"]:
                    raise
                _tell("error", error)
                raise typer.Exit(2) from None
            except OSError as error:  # what may not be read or written is no fault of the program
                if ctx.params["debug"] or error.errno == errno.EPIPE:
                    raise
                _tell("error", _in_words(error))
                raise typer.Exit(2) from None
            except Exception as error:  # of click, or of typer's own copy of it
                _hint_at_sizes(error)
                _hint_at_dashes(error)
                raise


def _in_words(error: OSError) -> str:
    """What the system refused, without its number."""
    if not (error.filename and error.strerror):
        return str(error)
    return (
        f"{error.filename}: {error.strerror}: check that the path is right, and who may read and "
        f"write it"
    )


def _hint_at_sizes(error: Any) -> None:
    """A size under 0 is taken for an option, and refused as one that there is not."""
    if re.fullmatch(r"-\d", str(getattr(error, "option_name", ""))):
        error.message += " (a number under 0? sizes M, N and K, and PLACE, are over 0)"


def _hint_at_dashes(error: Any) -> None:
    """An option of a benchmark is taken for one of ``costmodel bench``."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", "")
    if option and context is not None and context.info_name == "bench":
        error.message += (
            f" (an option of the benchmark? they come after --: costmodel bench NAME -- {option})"
        )


class _Line(logging.Formatter):
    """A record in one line, whatever a compiler or a file has said in it."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record), _MOST_CHARACTERS)


@contextmanager
def _log_lines(level: int) -> Iterator[None]:
    """What the library logs from this level on, on stderr."""
    log = logging.getLogger("costmodel")
    handler = logging.StreamHandler()
    handler.setFormatter(_Line())
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _tell(kind: str, what: object) -> None:
    print(f"{kind}: {printable(str(what))}", file=sys.stderr)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _module in (collecting, modelling, tuning, explaining, upkeep):
    for _name, _command in _module.COMMANDS.items():
        app.command(_name)(_command)
app.add_typer(caching.app, name="cache")


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show where an error came from.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what is skipped, and why: a line each.")
    ] = False,
) -> None:
    """A learned cost-model autotuner for Triton GEMM."""


def main() -> None:
    """The entry point of the ``costmodel`` program."""
    for stream in (sys.stdout, sys.stderr):  # one that cannot show a dash prints "?", and goes on
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # Told to end, as by a batch system, a command saves what it has, as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app()
