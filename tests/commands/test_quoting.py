"""Tests of names and paths with special characters: on command lines, in config files and in printed commands."""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import TINY_SETTINGS, command_environment, run_error, run_ok
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nmt.config import TrainRun
from nmt.config.data import CorpusConfig, DataConfig
from nmt.runs.checkpoint import load_config, save_config
from nmt.system.quoting import (
    escape_interpolations,
    from_yaml,
    quote_for_hydra,
    quote_for_shell,
    quote_setting,
    to_yaml,
)

SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh") if shutil.which(shell)]
PUNCTUATION_AND_LETTERS = "".join(map(chr, range(33, 127))).replace("/", "")
SPECIAL_CHARACTERS = list("\\${}\"'=,[]()#%~!*?&|;<>`^: \n\t\x1bax0_.-é☺\u2028\u00a0")
NAMES = [
    "ünï",
    "a b",
    " a ",
    "-x",
    "--",
    "~",
    "a=b",
    "a,b",
    "[a]",
    "{a}",
    "$HOME",
    "$(id)",
    "`id`",
    "#",
    "100%",
    "!1",
    "a'b",
    'a"b',
    "a\\",
    "\\",
    "\\\\",
    "a\\b",
    'a\\"b',
    "null",
    "true",
    "1_000",
    "1e5",
    "2024-11-24",
    "nan",
    ".5",
    "a:b",
    "*",
    "a\nb",
    "a\n",
    "\ta",
    "\x1b[31m",
    "🐕",
    "日本",
    "a\u2028b",
    "&",
    "a;b",
    "?",
    PUNCTUATION_AND_LETTERS,
]
SHORT = ("search.beam=1", "search.max_length=9")  # an untrained model does not end its translations by itself
DIFFICULT_NAME = " -a=b,[c]{d}${e}#%~'\"\\!*\n é🐕 \\"
any_text = st.text(
    st.sampled_from(SPECIAL_CHARACTERS) | st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=15
)
hydra = OverridesParser.create()


def parse_with_shell(shell: str, arguments: list[str]) -> list[str]:
    """Return the arguments that a shell passes on when they are pasted into it."""
    script = "".join(f"printf '%s\\0' {argument}\n" for argument in arguments)
    done = subprocess.run([shell, "-c", script], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def parse_with_hydra(argument: str) -> str:
    """Return the text that a command reads from an argument."""
    config = OmegaConf.create({"key": None})
    OmegaConf.update(config, "key", hydra.parse_override(argument).value())
    assert isinstance(config.key, str)
    return config.key


@given(any_text)
def test_quote_for_hydra_round_trip(text: str) -> None:
    assert parse_with_hydra(f"key={quote_for_hydra(text)}") == text
    assert quote_setting("key", text).isprintable()


@pytest.mark.parametrize("shell", SHELLS)
def test_quote_for_shell_round_trip(shell: str) -> None:
    rng = random.Random(1)
    texts = NAMES + ["".join(rng.choices(SPECIAL_CHARACTERS, k=rng.randrange(1, 15))) for _ in range(500)]
    arguments = parse_with_shell(shell, [quote_setting("key", text) for text in texts])
    assert [parse_with_hydra(argument) for argument in arguments] == texts
    assert parse_with_shell(shell, [quote_for_shell(text) for text in texts]) == texts
    [list_argument] = parse_with_shell(shell, [quote_setting("key", texts)])
    config = OmegaConf.create({"key": hydra.parse_override(list_argument).value()})
    assert OmegaConf.to_container(config, resolve=True) == {"key": texts}


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
    plain = replace(run, data=replace(data, path="plain"))
    save_config(tmp_path, plain)
    assert load_config(tmp_path) == plain


def test_printed_commands_can_be_pasted_into_shells(small_corpus: Path, tmp_path: Path) -> None:
    """Shells parse the command at the end of training, and the remedies in errors, into the original name."""
    python = tmp_path / "bin" / "python"  # prints its arguments
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nfor argument; do printf '%s\\0' \"$argument\"; done\n")
    python.chmod(0o755)
    environment = command_environment(tmp_path) | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    for name in (*NAMES[:8], "a'b", 'a"b', "a\\", "a\nb\x1b", "🐕", PUNCTUATION_AND_LETTERS):
        command = f"python -m nmt.evaluate {quote_setting('checkpoint', f'runs/{name}')}"
        if name in ("ünï", PUNCTUATION_AND_LETTERS):
            data = ("data=text", f"data.path={small_corpus}")
            settings = (f"name={quote_for_hydra(name)}", *data, *TINY_SETTINGS, "train.max_steps=1")
            run_ok("train", *settings, folder=tmp_path)
            log = (tmp_path / "runs" / name / "train.log").read_text(encoding="utf-8").splitlines()
            assert command in log[-1]
            command = log[-1].partition("evaluate with: ")[2]
        for shell in SHELLS:
            done = subprocess.run(
                [shell, "-c", command], cwd=tmp_path, env=environment, capture_output=True, check=True
            )
            *module, checkpoint = done.stdout.decode().split("\0")[:-1]
            assert module == ["-m", "nmt.evaluate"]
            assert parse_with_hydra(f"key={checkpoint.partition('=')[2]}") == f"runs/{name}"
        if name == PUNCTUATION_AND_LETTERS:
            assert "bleu" in run_ok("evaluate", checkpoint, "pictures=0", *SHORT, folder=tmp_path)
    real_command = f"'{sys.executable}' {command.partition(' ')[2]} pictures=0 {' '.join(SHORT)}"
    environment = command_environment(tmp_path)
    done = subprocess.run([SHELLS[-1], "-c", real_command], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for argument, text in (("name=ünï", "ünï"), ("name=a'b\"", "a'b\""), ("init_from=${x", "${x"), ("name=1e5", "1e5")):
        remedy = run_error("train", argument, folder=tmp_path).rpartition(": ")[2]
        for shell in SHELLS:
            [parsed] = parse_with_shell(shell, [remedy])
            assert parse_with_hydra(f"key={parsed.partition('=')[2]}") == text


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("name=a ", "would be read as a; quote it: 'name=\"a \"'"),
        (r"data.path=a\,b", r"""would be read as a,b; quote it: 'data.path="a\,b"'"""),
        ("init_from=true", "would be read as True; quote it: 'init_from=\"true\"'"),
        ("hydra.run.dir=2024_11_24", "would be read as 20241124; quote it: 'hydra.run.dir=\"2024_11_24\"'"),
        (r'name="\${x}"', "the name of a run folder cannot contain ${"),
        (r'hydra.run.dir="\${x}"', "the name of a run folder cannot contain ${"),
        ("data.path=${x}", "write \\${ and quote the value"),
        ("data.path=a\udcff", "is not UTF-8"),
    ],
)
def test_ambiguous_value_is_rejected(argument: str, message: str, tmp_path: Path) -> None:
    assert message in run_error("train", argument, folder=tmp_path) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ["compare=[1.10,runs/b]", r"compare=[a\,b,c]", "compare=[true,b]"])
def test_ambiguous_list_item_is_rejected(argument: str, tmp_path: Path) -> None:
    assert "quote it: 'compare=[" in run_error("evaluate", argument, folder=tmp_path)


def test_unusable_working_directory_error(tmp_path: Path) -> None:
    folder = tmp_path / "a${x}"
    folder.mkdir()
    assert "use another working directory" in run_error("train", "seed=1", folder=folder)


def test_all_path_settings_accept_special_characters(small_corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / DIFFICULT_NAME
    shutil.copytree(small_corpus, folder)
    data_path, name = quote_for_hydra(str(folder)), DIFFICULT_NAME.replace("${", "{").strip("/")
    run = quote_for_hydra(f"runs/{name}")
    base = (
        "data=text",
        f"data.path={data_path}",
        f"data.cache={quote_for_hydra(str(folder / 'cache'))}",
        f"name={quote_for_hydra(name)}",
        *TINY_SETTINGS,
    )
    run_ok("train", *base, "train.max_steps=2", folder=tmp_path)
    config = load_config(tmp_path / "runs" / name)
    assert (config.name, config.data.path, config.data.cache) == (name, str(folder), str(folder / "cache"))
    run_ok("train", *base, "train.max_steps=3", "resume=true", folder=tmp_path)
    run_ok("train", *base, "train.max_steps=2", "overwrite=true", folder=tmp_path)
    run_ok("train", *base, "train.max_steps=1", "name=other", f"init_from={run}", folder=tmp_path)
    elsewhere = f"hydra.run.dir={quote_for_hydra(DIFFICULT_NAME.replace('${', ''))}"
    run_ok("train", *base, "train.max_steps=1", elsewhere, folder=tmp_path)
    evaluation = (f"checkpoint={run}", f"data.path={data_path}", "pictures=1", *SHORT)
    run_ok("evaluate", *evaluation, folder=tmp_path)
    run_ok("evaluate", f"compare=[{run},runs/other]", *SHORT, "pictures=0", folder=tmp_path)
    keys = ("input", "output", "target", "prefix", "alignments", "gold")
    files = {key: folder / f"{key}{DIFFICULT_NAME}" for key in keys}
    for key in ("input", "target", "prefix"):
        files[key].write_text("Die Frau liest .\n", encoding="utf-8")
    files["gold"].write_text("0-0\n", encoding="utf-8")
    paths = {key: f"{key}={quote_for_hydra(str(path))}" for key, path in files.items()}
    translate = (f"checkpoint={run}", "search.max_length=9", paths["input"], paths["output"])
    run_ok("translate", *translate, paths["prefix"], paths["alignments"], folder=tmp_path)
    assert files["output"].read_text(encoding="utf-8") and files["alignments"].is_file()
    run_ok("translate", translate[0], *translate[2:], paths["target"], "mode=score", folder=tmp_path)
    pair = (f"source={quote_for_hydra(str(files['input']))}", paths["target"], paths["gold"])
    run_ok("align", f"checkpoint={run}", *pair, paths["output"], folder=tmp_path)
    dictionary = ("search.replace_unknown=true", f"search.dictionary={quote_for_hydra(str(folder / 'none'))}")
    message = run_error("translate", f"checkpoint={run}", *dictionary, folder=tmp_path)
    assert message.endswith("/none is not a file")
