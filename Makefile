# Needs python3 (3.11 or newer), pip and make; everything else goes into .venv.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo demo-hybrid demo-vit demo-huggingface lab test test-all wheel-test fuzz check bench gallery pictures docs clean
.DELETE_ON_ERROR:

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[examples,exact,huggingface,dev]'
	touch $@

demo: .venv/installed           ## train a GPT on real text through a pipeline of 4 ranks
	$(PY) examples/gpt3/train.py $(ARGS)

demo-hybrid: .venv/installed    ## the same over 8 processes: a pipeline of 2, tensor ranks of 2, 2 replicas
	$(PY) examples/gpt3/train.py --ranks 2 --tensor 2 --replicas 2 $(ARGS)

demo-vit: .venv/installed       ## train a vision transformer on handwritten digits: a pipeline of 2, tensor ranks of 2
	$(PY) examples/vit/train.py $(ARGS)

demo-huggingface: .venv/installed   ## transformers' Trainer trains a LLaMA: a pipeline of 2, tensor ranks of 2
	$(PY) examples/huggingface/demo.py $(ARGS)

lab: .venv/installed            ## the Megatron lab: two tensor ranks, mock data, a checkpoint
	$(PY) examples/megatron_lab/lab.py $(ARGS)

# How many processes share the tests.
JOBS ?= 2
SPREAD := --numprocesses $(JOBS) --dist worksteal
test: .venv/installed           ## the suite, without matrices that repeat what parts of them show
	$(PY) -m pytest $(SPREAD) -m "not exhaustive" $(ARGS)

test-all: test                  ## and those matrices
	$(PY) -m pytest $(SPREAD) -m exhaustive $(ARGS)

WHEEL := build/wheel
wheel-test: .venv/installed     ## the quick tests against the built wheel, out of reach of the source
	rm -rf build
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir $(WHEEL) .
	$(PY) -m pip install --quiet --no-deps --target $(WHEEL)/site $(WHEEL)/*.whl
	mkdir $(WHEEL)/outside
	cp -r *.md pyproject.toml benchmarks docs examples tests $(WHEEL)/outside
	cd $(WHEEL)/outside && export PYTHONPATH=$(abspath $(WHEEL))/site && \
	$(abspath $(PY)) -c 'import pipeflow; assert pipeflow.__file__.startswith("$(abspath $(WHEEL))/site/"), pipeflow' && \
	$(abspath $(PY)) -m pytest $(SPREAD) -m "not slow" tests/core tests/draw tests/cli tests/runtime tests/test_*.py $(abspath $(WHEEL))/site/pipeflow $(ARGS)

fuzz: .venv/installed           ## random configurations against plain torch: make fuzz ARGS=0:1000
	$(PY) -m tests.fuzz $(ARGS)

check: .venv/installed          ## lint, types, layers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_layers.py tests/test_style.py

bench: .venv/installed          ## every benchmark, side by side with its peers
	$(PY) -m benchmarks $(ARGS)

gallery: .venv/installed        ## docs/schedules.md: every schedule, drawn and measured; docs/models.md: the models
	$(PY) docs/gallery.py
	$(PY) docs/tried.py

pictures: .venv/installed        ## those of the README, with Chromium
	$(PY) docs/pictures.py

SITE := build/docs
docs: .venv/installed            ## the documentation as a site, in build/docs
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going docs $(SITE)
	@echo "open $(SITE)/index.html"

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
