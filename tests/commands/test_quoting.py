"""Names and paths of all characters: on command lines, in files of settings, in commands that are printed."""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import TINY_SETTINGS, command_environment, run_error, run_nmt, run_ok
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nmt.config import TrainRun
from nmt.config.data import CorpusConfig, DataConfig
from nmt.runtime.quoting import (
    escape_interpolations,
    from_yaml,
    quote_for_hydra,
    quote_for_shell,
    quote_setting,
    to_yaml,
)
from nmt.training.checkpoint import load_config, save_config

SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh") if shutil.which(shell)]
EVERY = "".join(map(chr, range(33, 127))).replace("/", "")
SIGNS = list("\\${}\"'=,[]()#%~!*?&|;<>`^: \n\t\x1bax0_.-é☺\u2028\u00a0")
NAMES = [
    *(
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
    ),
    *(
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
    ),
    *("a\nb", "a\n", "\ta", "\x1b[31m", "🐕", "日本", "a\u2028b", "&", "a;b", "?", EVERY),
]
NASTY = " -a=b,[c]{d}${e}#%~'\"\\!*\n é🐕 \\"
any_text = st.text(
    st.sampled_from(SIGNS) | st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=15
)
hydra = OverridesParser.create()


def read_by(shell: str, arguments: list[str]) -> list[str]:
    """What a shell makes of arguments as they are pasted."""
    script = "".join(f"printf '%s\\0' {argument}\n" for argument in arguments)
    done = subprocess.run([shell, "-c", script], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def read_by_hydra(argument: str) -> str:
    """What a command makes of an argument."""
    config = OmegaConf.create({"key": None})
    OmegaConf.update(config, "key", hydra.parse_override(argument).value())
    assert isinstance(config.key, str)
    return config.key


@given(any_text)
def test_hydra_reads_a_quoted_text_as_it_was(text: str) -> None:
    assert read_by_hydra(f"key={quote_for_hydra(text)}") == text
    assert quote_setting("key", text).isprintable()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_reads_a_pasted_setting_as_it_was(shell: str) -> None:
    draw = random.Random(1)
    texts = NAMES + ["".join(draw.choices(SIGNS, k=draw.randrange(1, 15))) for _ in range(500)]
    found = read_by(shell, [quote_setting("key", text) for text in texts])
    assert [read_by_hydra(argument) for argument in found] == texts
    assert read_by(shell, [quote_for_shell(text) for text in texts]) == texts
    [several] = read_by(shell, [quote_setting("key", texts)])
    read = OmegaConf.create({"key": hydra.parse_override(several).value()})
    assert OmegaConf.to_container(read, resolve=True) == {"key": texts}


@given(any_text)
def test_yaml_gives_a_text_back_as_it_was(text: str) -> None:
    tree = {"name": text, "list": [text, {"x": text}]}
    assert from_yaml(to_yaml(tree)) == tree
    assert OmegaConf.to_container(OmegaConf.create(escape_interpolations(tree)), resolve=True) == tree


@pytest.mark.parametrize("name", [*NAMES, NASTY])
def test_saved_settings_are_those_that_were_given(name: str, tmp_path: Path) -> None:
    data = DataConfig(format="text", path=name, source=name, cache=name, corpora=[CorpusConfig(path=name)])
    run = TrainRun(name=name.replace("${", "") if name.strip("./ ") else "x", data=data, init_from=name)
    save_config(tmp_path, run)
    assert load_config(tmp_path) == run
    save_config(tmp_path, plain := replace(run, data=replace(data, path="plain")))
    assert load_config(tmp_path) == plain


def test_what_is_printed_can_be_pasted(home: Path, corpus: Path, tmp_path: Path) -> None:
    """The command at the end of training is run by every shell; a remedy is as good."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nfor argument; do printf '%s\\0' \"$argument\"; done\n")
    python.chmod(0o755)
    seen = command_environment(tmp_path) | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    for name in (*NAMES[:8], "a'b", 'a"b', "a\\", "a\nb\x1b", "🐕", EVERY):
        if name in ("ünï", EVERY):
            given = (
                f"name={quote_for_hydra(name)}",
                "data=text",
                f"data.path={corpus}",
                *TINY_SETTINGS,
                "train.max_steps=1",
            )
            run_ok("train", *given, folder=tmp_path)
        told = f"python -m nmt.evaluate {quote_setting('checkpoint', f'runs/{name}')}"
        if name in ("ünï", EVERY):
            log = (tmp_path / "runs" / name / "train.log").read_text(encoding="utf-8").splitlines()
            assert told in log[-1]
            told = log[-1].partition("evaluate with: ")[2]
        for shell in SHELLS:
            done = subprocess.run([shell, "-c", told], cwd=tmp_path, env=seen, capture_output=True, check=True)
            *command, checkpoint = done.stdout.decode().split("\0")[:-1]
            assert (
                command == ["-m", "nmt.evaluate"]
                and read_by_hydra(f"key={checkpoint.partition('=')[2]}") == f"runs/{name}"
            )
        if name == EVERY:
            assert "bleu" in run_ok("evaluate", checkpoint, "pictures=0", "search.beam=1", folder=tmp_path)
    command = f"'{sys.executable}' {told.partition(' ')[2]} pictures=0"
    seen = command_environment(tmp_path)
    real = subprocess.run([SHELLS[-1], "-c", command], cwd=tmp_path, env=seen, capture_output=True)
    assert real.returncode == 0, real.stderr.decode()
    for argument, text in (("name=ünï", "ünï"), ("name=a'b\"", "a'b\""), ("init_from=${x", "${x"), ("name=1e5", "1e5")):
        remedy = run_error("train", argument, folder=tmp_path).rpartition(": ")[2]
        for shell in SHELLS:
            [found] = read_by(shell, [remedy])
            assert read_by_hydra(f"key={found.partition('=')[2]}") == text


@pytest.mark.parametrize(
    ("argument", "answer"),
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
def test_a_text_that_would_be_another_one_is_refused(argument: str, answer: str, tmp_path: Path) -> None:
    assert answer in run_error("train", argument, folder=tmp_path) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ["compare=[1.10,runs/b]", r"compare=[a\,b,c]", "compare=[true,b]"])
def test_so_is_one_of_a_list(argument: str, tmp_path: Path) -> None:
    assert "quote it: 'compare=[" in run_error("evaluate", argument, folder=tmp_path)


def test_a_folder_that_hydra_cannot_work_in_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "a${x}"
    folder.mkdir()
    assert "use another working directory" in run_error("train", "seed=1", folder=folder)


def test_every_key_that_takes_a_path_takes_any_path(home: Path, corpus: Path, tmp_path: Path) -> None:
    """One name of all kinds of characters, in all of these keys, from training to evaluation."""
    place = tmp_path / NASTY
    shutil.copytree(corpus, place)
    folder, name = quote_for_hydra(str(place)), NASTY.replace("${", "{").strip("/")
    run = quote_for_hydra(f"runs/{name}")
    base = (
        "data=text",
        f"data.path={folder}",
        f"data.cache={quote_for_hydra(str(place / 'cache'))}",
        f"name={quote_for_hydra(name)}",
        *TINY_SETTINGS,
    )
    run_ok("train", *base, "train.max_steps=2", folder=tmp_path)
    found = load_config(tmp_path / "runs" / name)
    assert (found.name, found.data.path, found.data.cache) == (name, str(place), str(place / "cache"))
    run_ok("train", *base, "train.max_steps=3", "resume=true", folder=tmp_path)
    run_ok("train", *base, "train.max_steps=2", "overwrite=true", folder=tmp_path)
    run_ok("train", *base, "train.max_steps=1", "name=other", f"init_from={run}", folder=tmp_path)
    elsewhere = f"hydra.run.dir={quote_for_hydra(NASTY.replace('${', ''))}"
    run_ok("train", *base, "train.max_steps=1", elsewhere, folder=tmp_path)
    checked = run_nmt(
        "evaluate", f"checkpoint={run}", f"data.path={folder}", "pictures=1", "search.beam=1", folder=tmp_path
    )
    assert checked.returncode == 0, checked.stderr.decode()
    run_ok("evaluate", f"compare=[{run},runs/other]", "search.beam=1", "pictures=0", folder=tmp_path)
    files = {key: place / f"{key}{NASTY}" for key in ("input", "output", "target", "prefix", "alignments", "gold")}
    for key in ("input", "target", "prefix"):
        files[key].write_text("Die Frau liest .\n", encoding="utf-8")
    files["gold"].write_text("0-0\n", encoding="utf-8")
    paths = {key: f"{key}={quote_for_hydra(str(path))}" for key, path in files.items()}
    translate = (f"checkpoint={run}", paths["input"], paths["output"])
    run_ok("translate", *translate, paths["prefix"], paths["alignments"], folder=tmp_path)
    assert files["output"].read_text(encoding="utf-8") and files["alignments"].is_file()
    run_ok("translate", *translate, paths["target"], "mode=score", folder=tmp_path)
    pair = (f"source={quote_for_hydra(str(files['input']))}", paths["target"], paths["gold"])
    run_ok("align", f"checkpoint={run}", *pair, paths["output"], folder=tmp_path)
    message = run_error("translate", f"checkpoint={run}", "search.replace_unknown=true",
                      f"search.dictionary={quote_for_hydra(str(place / 'none'))}", folder=tmp_path)  # fmt: skip
    assert message.endswith("/none is not a file")
