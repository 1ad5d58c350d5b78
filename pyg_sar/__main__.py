"""``python -m pyg_sar`` is ``pyg-sar``; so is ``torchrun ... -m pyg_sar``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyg_sar.usage.commands import parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``pyg-sar`` and returns its exit code; only a command's own work imports PyTorch.

    0: done. 1: something failed. 2: a mistake of the user's, one line on stderr. 75: SIGUSR1 came,
    the checkpoint is saved. 130: Ctrl-C.
    """
    try:
        arguments = parsed(sys.argv[1:] if argv is None else argv)
    except (ImportError, ValueError) as error:
        sys.stderr.write(f"pyg-sar: error: {error}\n")
        return 2
    try:
        from pyg_sar.tools.cli import run_parsed
    except KeyboardInterrupt:  # While PyTorch is imported.
        sys.stderr.write("Interrupted before it began: nothing is written\n")
        return 130
    return run_parsed(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
