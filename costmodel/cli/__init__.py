"""The command line: each command parses, calls the library, prints.

People get tables on stdout and progress on stderr; with ``--json`` stdout holds one JSON document
and nothing else. An exception that costmodel raises on purpose becomes one line on stderr and exit
code 2.
"""

import errno
import io
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from typing import Annotated, Any

from typer import Exit, Option, Typer, echo
from typer.core import TyperGroup

from costmodel import __version__
from costmodel.cli import (
    bench,
    cache,
    collect,
    compile,
    doctor,
    kernels,
    models,
    ranking,
    report,
    tune,
)
from costmodel.cli.common import note
from costmodel.cli.waiting import doing, told
from costmodel.errors import CostModelError
from costmodel.validation import one_line

_MOST_CHARACTERS = 400


class _Commands(TyperGroup):
    """Turns the errors and warnings of the library into lines for people."""

    def invoke(self, ctx: Any) -> Any:  # a click.Context, or since typer 0.29 typer's own
        with warnings.catch_warnings(), _log_lines(ctx.params["verbose"]):
            warnings.simplefilter("default", RuntimeWarning)
            warnings.showwarning = lambda message, *_: note(f"warning: {message}")
            try:
                return super().invoke(ctx)
            except (CostModelError, OSError) as error:
                # An OSError here is a file that may not be read or written, not a bug.
                if ctx.params["debug"] or getattr(error, "errno", None) == errno.EPIPE:
                    raise
                note(f"error: {_in_words(error)}")
                if _is_of_stdout(error):  # Python would try to write the rest at its end
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                raise Exit(2) from None
            except KeyboardInterrupt:
                note("error: interrupted: run it again")
                raise Exit(130) from None
            except Exception as error:  # click's or typer's: a wrong command line
                _add_hint(error)
                raise


def _is_of_stdout(error: Any) -> bool:
    """Return True if stdout is full; an error of a file would name the file."""
    return getattr(error, "errno", None) == errno.ENOSPC and not error.filename


def _in_words(error: Any) -> str:
    """Return an error of the system without its number, and any other error as it is."""
    name, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
    if _is_of_stdout(error):
        return f"the output could not be written: {reason}: make room, or name another place"
    if not (name and reason):
        return str(error)
    return f"{name}: {reason}: check that the path is right, and who may read and write it"


def _add_hint(error: Any) -> None:
    """Add the value that is no number, and explain sizes, as ``-1`` looks like an option."""
    if re.fullmatch(r"-\d", str(getattr(error, "option_name", ""))):
        error.message += " (a number under 0? sizes M, N and K, and PLACE, are over 0)"
    if not getattr(error, "message", ""):
        return
    if details := getattr(error.__context__, "errors", None):  # pydantic's
        error.message = f"{details()[0]['input']!r}: {error.message}"
    if getattr(getattr(error, "param", None), "name", "") in ("m", "n", "k"):
        error.message += " (expected M N K apart, as whole numbers: 512 4096 4096)"


class _Line(logging.Formatter):
    """Formats a record as one line, whatever a compiler or a file put into its text."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record), _MOST_CHARACTERS)


@contextmanager
def _log_lines(verbose: bool) -> Iterator[None]:
    """Write the library's log to stderr; verbose: from level INFO on, else from WARNING on."""
    log = logging.getLogger("costmodel")
    handler = logging.StreamHandler()
    handler.setFormatter(_Line())
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


app = Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    collect.collect, compile.compile_space, models.train, models.evaluate, ranking.rank, tune.tune,
    ranking.explain, report.report, doctor.doctor,
):  # fmt: skip
    app.command(_command.__name__.removesuffix("_space"))(_command)
app.command("bench", context_settings=bench.PASS_ON)(bench.bench)
app.add_typer(cache.app, name="cache")
app.add_typer(kernels.app, name="kernels")


def _versions(asked: bool) -> None:
    """Print the versions of costmodel, torch and Triton."""
    if asked:
        found = {d.name: d.version for d in distributions() if d.name in ("torch", "triton")}
        echo(f"costmodel {__version__}, {', '.join(map(' '.join, sorted(found.items())))}")
        raise Exit


@app.callback()
def _options(
    debug: Annotated[bool, Option(help="Show where an error came from.")] = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Say what is skipped, and why: a line each.")
    ] = False,
    version: Annotated[
        bool, Option("--version", help="Show versions.", callback=_versions, is_eager=True)
    ] = False,
) -> None:
    """A learned cost-model autotuner for Triton."""


def main() -> None:
    """The entry point of the ``costmodel`` program."""
    for stream in (sys.stdout, sys.stderr):  # one that cannot print a dash prints "?" instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # If a batch system tells a command to end, it saves what it has, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if "--json" not in sys.argv:  # with it, machines read stderr: the events of `collect`
        doing(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
    with told():
        app()
