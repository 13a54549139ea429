"""The notebooks run from top to bottom."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from builders import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = (
    "data=text data.path={corpus} data.alignments=links tokenizer.vocab_size=400 model.embed=8 model.hidden=16 "
    "train.max_steps=2 train.validate_every=2 device=cpu"
)


def read_notebook(path: Path) -> Any:
    return pytest.importorskip("nbformat", reason="the extra `dev` has nbformat").read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    for cell in read_notebook(path).cells:
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(
    path: Path, small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the extra `dev` has nbclient and ipykernel")
    traitlets_config = pytest.importorskip("traitlets.config", reason="nbclient brings it")
    pytest.importorskip("ipykernel", reason="the extra `dev` has nbclient and ipykernel")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notebook = read_notebook(path)
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert parameters.source.startswith('SETTINGS = ""')
    parameters.source = f"SETTINGS = {QUICK.format(corpus=small_corpus)!r}"
    # Over TCP, Jupyter picks free ports, closes them, and lets the kernel open them again: another test may be first.
    with TemporaryDirectory() as sockets:  # its path is short enough for a socket's name
        config = traitlets_config.Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        resources = {"metadata": {"path": str(tmp_path)}}
        client = nbclient.NotebookClient(notebook, config=config, timeout=120, resources=resources)
        client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert printed.count("finished at step 2") == 2 and "error" not in printed, printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
