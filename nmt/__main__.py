"""All commands under one name: `attention-nmt train ...`, which is `python -m nmt.train ...`.

attention-nmt --help
attention-nmt --version
python -m nmt --help        # the same where the scripts of the environment are not on the path
"""

import runpy
import sys

from nmt import __version__
from nmt.config import COMMANDS
from nmt.errors import suggest
from nmt.system.text import echo

HELP = """Train, evaluate and use models for machine translation with attention.

  attention-nmt COMMAND key=value ...
  attention-nmt COMMAND --help
  attention-nmt --version

Commands
  prepare    Make a corpus for training from raw files.
  train      Train a model.
  evaluate   Evaluate a model on a split, or compare several models.
  translate  Translate lines of text or an HTML document, or score translations.
  align      Align the words of sentence pairs.
  export     Export a model as a page, as a folder or to the Hugging Face hub.
  serve      Answer requests for translations over HTTP.
  watch      Show curves and sample translations of runs in a browser.

`python -m nmt.COMMAND` is the same as `attention-nmt COMMAND`."""


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"nmt.{name}", run_name="__main__", alter_sys=True)
    elif name in ("-h", "--help"):
        echo(HELP)
    elif name == "--version":
        echo(f"attention-nmt {__version__}")
    else:
        sys.exit(f"error: there is no command '{name}' (attention-nmt --help lists them){suggest(name, COMMANDS)}")


if __name__ == "__main__":
    main()
