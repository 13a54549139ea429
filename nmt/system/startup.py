"""Answer `--help` and `--version` before PyTorch is imported, which takes seconds. Each command imports this first.

Garbage collection waits until everything is imported, where it would find nothing; `cli.run_program` turns it on again.
"""

import gc
import sys

from nmt import __version__
from nmt.config import COMMANDS
from nmt.system.cli import main
from nmt.system.text import echo

spec = getattr(sys.modules["__main__"], "__spec__", None)
command = spec.name.removeprefix("nmt.") if spec else None  # as in `python -m nmt.train`

if command in COMMANDS and "--version" in sys.argv:
    echo(f"attention-nmt {__version__}")
    sys.exit()

if command in COMMANDS and {"-h", "--help"} & set(sys.argv):
    main(command)(lambda settings: None)()
    sys.exit()

if command in COMMANDS:
    gc.disable()
