"""Export a trained model: as one HTML file that translates in any browser, or as a folder for the other commands.

python -m nmt.export checkpoint=runs/NAME output=mine.html
python -m nmt.export checkpoint=runs/NAME output=model-to-share
python -m nmt.export --help
"""

from nmt import export_checkpoint
from nmt.config import ExportRun
from nmt.runtime.cli import main
from nmt.runtime.logging import log, log_to_stderr


@main("export")
def export(command: ExportRun) -> None:
    log_to_stderr()
    export_checkpoint(command.checkpoint, str(command.output), command.average, command.search, command.title)
    log.info(f"exported {command.checkpoint} to {command.output}")


if __name__ == "__main__":
    export()
