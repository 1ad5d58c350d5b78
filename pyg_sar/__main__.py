"""``python -m pyg_sar`` is ``pyg-sar``; so is ``torchrun ... -m pyg_sar``."""

from pyg_sar.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
