"""The settings of a script, key=value on its command line."""

import sys

from nmt.runtime.streams import use_utf8


def settings_given(**known: str) -> dict[str, str]:
    """Those of the command line; others as known here. One that is not ends the program with what it is for. From
    here on the program prints UTF-8."""
    use_utf8()
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if given.keys() - known.keys() or not all(given.values()):
        sys.exit(sys.modules["__main__"].__doc__)
    return known | given
