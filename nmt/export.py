"""Export a trained model: as one HTML file that translates in any browser, as a folder, or to the Hugging Face hub.

python -m nmt.export checkpoint=runs/NAME output=mine.html
python -m nmt.export checkpoint=runs/NAME output=model-to-share
python -m nmt.export checkpoint=runs/NAME output=hf://OWNER/NAME license=cc-by-4.0
python -m nmt.export --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything that imports torch
from nmt.api import export_checkpoint
from nmt.config import ExportRun
from nmt.hub.push import push_model
from nmt.system.cli import main
from nmt.system.hub_client import is_hub_address
from nmt.system.logging import log


@main("export")
def export(command: ExportRun) -> None:
    output = str(command.output)
    if is_hub_address(output):
        commit = push_model(command.checkpoint, output, command.license, command.average)
        log.info(f"published {command.checkpoint} as {commit}")
        return
    export_checkpoint(command.checkpoint, output, command.average, command.search)
    log.info(f"exported {command.checkpoint} to {output}")


if __name__ == "__main__":
    export()
