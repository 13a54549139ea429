"""Imports and caches of the process that tests fork commands from.

Importing this module imports what commands need, also what they import late, and composes settings once, so that forked
commands find Hydra's plug-ins and the tables of its parser in place.
"""

# isort: off
import nmt  # noqa: F401  before torch, which reads the variables that it sets when it is imported
# isort: on

import gc
import importlib

import builders  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import pandas  # noqa: F401  pyarrow imports it where it is installed
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401  the first optimizer of a process imports it
import torch.distributed.run  # noqa: F401
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from nmt.config import COMMANDS
from nmt.system.command_line import CONFIG_DIR

with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
    for command, schema in COMMANDS.items():
        importlib.import_module(f"nmt.{command}")
        ConfigStore.instance().store(name=f"{command}_schema", node=schema)
        compose(command, ["hydra.verbose=false"])
gc.freeze()  # no forked process needs to look at these objects again
