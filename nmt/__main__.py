"""All commands under one name: `attention-nmt train ...`, which is `python -m nmt.train ...`.

attention-nmt --help
attention-nmt --version
python -m nmt --help        # the same where the scripts of the environment are not on the path
"""

import ast
import importlib.util
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
{commands}
`python -m nmt.COMMAND` is the same as `attention-nmt COMMAND`."""


def describe_command(name: str) -> str:
    """Return the first line of the docstring of a command, without importing it."""
    spec = importlib.util.find_spec(f"nmt.{name}")
    assert spec and spec.origin
    with open(spec.origin, encoding="utf-8") as file:
        docstring = ast.get_docstring(ast.parse(file.read()))
    return str(docstring).partition("\n")[0]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"nmt.{name}", run_name="__main__", alter_sys=True)
    elif name in ("-h", "--help"):
        echo(HELP.format(commands="".join(f"  {name:<11}{describe_command(name)}\n" for name in COMMANDS)))
    elif name == "--version":
        echo(f"attention-nmt {__version__}")
    else:
        sys.exit(f"error: there is no command '{name}' (attention-nmt --help lists them){suggest(name, COMMANDS)}")


if __name__ == "__main__":
    main()
