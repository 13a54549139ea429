"""Tests of names and paths with special characters: on command lines, in config files and in printed commands."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from builders import TINY_SETTINGS, run_ok
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nmt.config import TrainRun
from nmt.config.data import CorpusConfig, DataConfig
from nmt.runs.checkpoint import load_config, save_config
from nmt.system.quoting import escape_interpolations, from_yaml, quote_for_hydra, quote_setting, to_yaml

SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh") if shutil.which(shell)]
SPECIAL_CHARACTERS = list("\\${}\"'=,[]()#%~!*?&|;<>`^: \n\t\x1bax0_.-é☺\u00a0")
NAMES = ["ünï", "a b", "-x", "~", "a=b", "[a]", "$(id)", "#", "a'b", 'a"b', "a\\", 'a\\"b', "null", "1_000", "1e5"]
NAMES += ["a:b", "a\nb", "\x1b[31m", "a\u2028b", "?", "".join(map(chr, range(33, 127)))]
DIFFICULT_NAME = " -a=b,[c]{d}${e}#%~'\"\\!*\n é🐕 \\"
any_text = st.text(
    st.sampled_from(SPECIAL_CHARACTERS)
    | st.characters(exclude_categories=["Cs", "Zl", "Zp"], exclude_characters="\0\x85"),
    max_size=15,
)


def parse_with_hydra(argument: str) -> object:
    """Return what a command reads from an argument."""
    value = OverridesParser.create().parse_override(argument).value()
    return OmegaConf.to_container(OmegaConf.create({"key": value}), resolve=True)["key"]  # type: ignore[index,call-overload]


@given(any_text)
def test_quote_for_hydra_round_trip(text: str) -> None:
    assert parse_with_hydra(f"key={quote_for_hydra(text)}") == text


@pytest.mark.parametrize("shell", SHELLS)
def test_quote_setting_round_trip(shell: str) -> None:
    """A shell, then Hydra, read the text back, alone and in a list."""
    rng = random.Random(1)
    texts = NAMES + ["".join(rng.choices(SPECIAL_CHARACTERS, k=rng.randrange(1, 15))) for _ in range(100)]
    settings = [quote_setting("key", text) for text in texts] + [quote_setting("key", texts)]
    script = "".join(f"printf '%s\\0' {setting}\n" for setting in settings)
    done = subprocess.run([shell, "-c", script], capture_output=True, check=True)
    assert [parse_with_hydra(argument) for argument in done.stdout.decode().split("\0")[:-1]] == [*texts, texts]


@given(any_text)
def test_yaml_round_trip(text: str) -> None:
    tree = {"name": text, "list": [text, {"x": text}]}
    assert from_yaml(to_yaml(tree)) == tree
    assert OmegaConf.to_container(OmegaConf.create(escape_interpolations(tree)), resolve=True) == tree


@pytest.mark.parametrize("name", [*NAMES, DIFFICULT_NAME])
def test_save_config_round_trip(name: str, tmp_path: Path) -> None:
    data = DataConfig(format="text", path=name, source=name, cache=name, corpora=[CorpusConfig(path=name)])
    run = TrainRun(name=name.replace("${", "") if name.strip("./ ") else "x", data=data, init_from=name)
    save_config(tmp_path, run)
    assert load_config(tmp_path) == run


def test_paths_accept_special_characters(small_corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / DIFFICULT_NAME
    shutil.copytree(small_corpus, folder)
    name = DIFFICULT_NAME.replace("${", "{").strip("/")
    base = ("data=text", f"data.path={quote_for_hydra(str(folder))}", f"name={quote_for_hydra(name)}", *TINY_SETTINGS)
    run_ok("train", *base, "train.max_steps=2", folder=tmp_path)
    config = load_config(tmp_path / "runs" / name)
    assert (config.name, config.data.path) == (name, str(folder))
    run_ok("train", *base, "train.max_steps=3", "resume=true", folder=tmp_path)
    run = quote_for_hydra(f"runs/{name}")
    files = {key: folder / f"{key}{DIFFICULT_NAME}" for key in ("input", "output", "alignments")}
    files["input"].write_text("Die Frau liest .\n", encoding="utf-8")
    paths = [f"{key}={quote_for_hydra(str(path))}" for key, path in files.items()]
    run_ok("translate", f"checkpoint={run}", "search.beam=1", "search.max_length=9", *paths, folder=tmp_path)
    assert files["output"].read_text(encoding="utf-8") and files["alignments"].is_file()
