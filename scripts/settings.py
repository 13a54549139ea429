"""Parse the settings of a script, key=value on its command line."""

import sys

from nmt.system.standard_streams import use_utf8


def parse_settings(**defaults: str) -> dict[str, str]:
    """Return the default settings updated by those of the command line, and make the script print UTF-8.

    An unknown or empty setting ends the program with the docstring of the script.
    """
    use_utf8()
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if given.keys() - defaults.keys() or not all(given.values()):
        sys.exit(sys.modules["__main__"].__doc__)
    return defaults | given
