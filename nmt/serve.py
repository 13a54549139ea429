"""Answer requests for translations over HTTP, by LibreTranslate's API.

python -m nmt.serve checkpoint=runs/NAME
python -m nmt.serve 'checkpoint=[runs/DE-EN,runs/EN-DE]' port=8080
python -m nmt.serve --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything that imports torch
import contextlib
import os
from collections import Counter

from nmt.api import open_translator
from nmt.config import ServeRun
from nmt.errors import UserError, extra_command
from nmt.runs.checkpoint import find_checkpoint, load_config
from nmt.system.cli import main
from nmt.system.device import choose_device
from nmt.system.logging import log
from nmt.system.memory import configure_malloc


def find_directions(models: list[list[str]]) -> list[tuple[str, str]]:
    """Return the languages of each model, given the paths of its members: names as `de` for `translation.de`.

    Raises:
        UserError: two models have the same direction.
    """
    directions = [load_config(find_checkpoint(paths[0])[0]).data.languages for paths in models]
    [((source, target), count)] = Counter(directions).most_common(1)
    if count > 1:
        raise UserError(
            f"{count} models translate {source} to {target}; give one for each direction, or several as one, in "
            "brackets: 'checkpoint=[[A,B]]'"
        )
    return directions


@main("serve")
def serve(command: ServeRun) -> None:
    try:
        from nmt.serving.app import Service, build_app
        from nmt.serving.batcher import Batcher
        from nmt.serving.server import bind, build_server
    except ImportError as error:
        raise UserError(f"nmt.serve needs {error.name}; install it with: {extra_command('serve')}") from None
    device = choose_device(command.device)
    configure_malloc()
    with bind(command.host, command.port) as listener:
        directions = find_directions(command.checkpoint)
        translators = [
            open_translator(paths, device, command.precision, command.average, command.search)
            for paths in command.checkpoint
        ]
        service = Service(command, directions, Batcher(translators), os.environ.get("NMT_API_KEY") or None)
        host, port = listener.getsockname()[:2]
        languages = ", ".join(f"{source} to {target}" for source, target in directions)
        listener.listen()  # from now on connections wait for the server instead of being refused
        log.info(f"translating {languages} at http://{f'[{host}]' if ':' in host else host}:{port}; Ctrl-C ends it")
        # Uvicorn ends cleanly and then repeats the signal, which scripts let background processes ignore.
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            build_server(build_app(service)).run(sockets=[listener])
        log.info("stopped")


if __name__ == "__main__":
    serve()
