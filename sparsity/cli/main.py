"""The command `sparsity`: its arguments, and its errors as exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from sparsity.cli import apply, checkpoints, diff, inspect, prune
from sparsity.cli.output import escape_controls
from sparsity.version import __version__

COMMANDS = {"inspect": inspect, "prune": prune, "diff": diff, "apply": apply}
NOTES = f"""
formats: {checkpoints.FORMATS_TEXT}
exit codes: 0 = done (diff: no difference), 1 = diff found differences, 2 = an error
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: arguments of the command; by default those of the process.

    Returns:
      The exit code: 0, 1 if `diff` finds differences, 2 after an error, one line on stderr.
    """
    try:
        arguments = _make_parser().parse_args(argv)
        with np.errstate(all="ignore"):  # comparing a signalling NaN warns
            code: int = arguments.run(arguments)
    except Exception as error:  # a user gets a line, whatever a library raises
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"sparsity: error: {escape_controls(message)}", file=sys.stderr)
        return 2
    return code


class _Parser(argparse.ArgumentParser):
    """Parser that raises exceptions for errors, and keeps the lines of its help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. See '{self.prog} --help'.")


def _make_parser() -> _Parser:
    about = "Inspects, prunes and compares checkpoints, and applies deltas."
    parser = _Parser(prog="sparsity", description=about, epilog=_format_examples(*COMMANDS))
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=command.ABOUT, description=command.ABOUT, epilog=_format_examples(name)
        )
        command.add_arguments(subparser)
        filter_help = (
            "only parameters of this path, or whose path this regular expression fully matches"
        )
        subparser.add_argument("--filter", metavar="KEY", help=filter_help)
        subparser.set_defaults(run=command.run)
    return parser


def _format_examples(*names: str) -> str:
    """Returns the end of a help text."""
    return "examples:\n" + "".join(COMMANDS[name].EXAMPLES for name in names) + NOTES
