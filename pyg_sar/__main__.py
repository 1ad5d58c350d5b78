"""``python -m pyg_sar`` is ``pyg-sar``; so is ``torchrun ... -m pyg_sar``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyg_sar.usage import COMMANDS, command_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``pyg-sar`` and returns its exit code; only a command's own work imports PyTorch."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        try:
            from pyg_sar.tools.cli import main as run

            return run(argv)
        except KeyboardInterrupt:  # While PyTorch is imported.
            sys.stderr.write("Interrupted before it began: nothing is written\n")
            return 130
    parser = command_parser()
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help)
    parser.parse_args(argv)  # Ends by help, by the version, or by an error.
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
