# nmt: every target works as the first command on a machine that has Python 3.11 or newer and make.

PYTHON ?= python3
RUN    ?= runs/toy
ARGS   ?=
DATA   ?=
PEERS  ?=

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.installed

# What the pages link to: each other, and code.
PAGES := README.md CONTRIBUTING.md LICENSE Dockerfile Makefile constraints.txt pyproject.toml \
         configs docs experiments nmt notebooks scripts tests

.PHONY: help train eval test bench results check docs format clean

help:  ## this page (the default)
	@echo 'usage: make TARGET [RUN=runs/NAME] [DATA=DIR] [ARGS="key=value ..."] [PYTHON=python3]'
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(READY)  ## train on the built-in corpus, then measure it; minutes on two cores. ARGS: settings of nmt.train
	$(if $(filter name=%,$(ARGS)),$(error the run is named by RUN=runs/NAME, not by name=))
	$(BIN)/python -m nmt.train name=toy hydra.run.dir='$(RUN)' resume=auto $(ARGS)
	$(BIN)/python -m nmt.evaluate checkpoint='$(RUN)'

eval: $(READY)  ## measure RUN on its test split: scores, translations, alignments. ARGS: settings of nmt.evaluate
	$(BIN)/python -m nmt.evaluate checkpoint='$(RUN)' $(ARGS)

test: $(READY)  ## run the tests, three at a time. ARGS: options of pytest, as ARGS="-m 'not slow'", ARGS=--precision=bf16
	$(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder $(ARGS)

bench: $(READY)  ## compare training speed with a plain loop; DATA=DIR: on DIR/{train,valid,test}.{de,en}; PEERS=1: with Eole too
	$(BIN)/python scripts/bench_training.py $(if $(DATA),data=$(DATA)) $(if $(PEERS),peers=$(PEERS)) $(ARGS)

results: $(READY)  ## a table of the runs in RUN, a sweep over seeds, in docs/recipes.md
	$(BIN)/python scripts/results.py '$(RUN)'

check: $(READY)  ## lint, formatting, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)  ## build the documentation as a site with search, in site/; a broken link is an error
	rm -rf build/pages
	mkdir -p build/pages
	ln -s $(PAGES:%=../../%) build/pages/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)

format: $(READY)  ## format the code and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## delete caches and built packages; never runs/ or .venv/
	rm -rf build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find nmt scripts tests -type d -name __pycache__ -prune -exec rm -rf {} +

# Touched last, so that an interrupted install is done again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'error: nmt needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@echo 'Installing into $(VENV): once, and some minutes where PyTorch has to be downloaded.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@
