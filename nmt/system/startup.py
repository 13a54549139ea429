"""Start a command quickly. Each command imports this module first, before PyTorch, whose import takes seconds.

`--help` and `--version` end the program here. Otherwise garbage collection waits until everything is imported: nearly
all objects of an import live as long as the process, and looking for garbage among them takes a tenth of the time.
`cli.main` turns it on again. Nothing happens unless the command is being run as a program.
"""

import gc
import sys

from nmt import __version__
from nmt.config import COMMANDS
from nmt.system.text import echo

spec = getattr(sys.modules["__main__"], "__spec__", None)
command = spec.name.removeprefix("nmt.") if spec else None  # as in `python -m nmt.train`

if command in COMMANDS and "--version" in sys.argv:
    echo(f"attention-nmt {__version__}")
    sys.exit()

if command in COMMANDS and {"-h", "--help"} & set(sys.argv):
    from nmt.system.cli import main

    main(command)(lambda settings: None)()
    sys.exit()

if command in COMMANDS:
    gc.disable()
