# Needs python3 (3.11 or newer), pip and make; everything else goes into .venv.
PYTHON ?= python3
PY := .venv/bin/python
# Where bytecode is not written, each process of the tests compiles pipeflow and the tests anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-hybrid demo-vit demo-huggingface lab test quick matrices test-all drill wheel-test fuzz planted check bench stubs gallery trl others pictures docs clean
.DELETE_ON_ERROR:

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[examples,exact,accelerate,lightning,huggingface,dev]'
	touch $@

demo: .venv/installed           ## train a GPT on real text with 4 pipeline ranks
	$(PY) examples/gpt3/train.py $(ARGS)

demo-hybrid: .venv/installed    ## the same with 8 processes: 2 pipeline ranks x 2 tensor ranks x 2 replicas
	$(PY) examples/gpt3/train.py --ranks 2 --tensor 2 --replicas 2 $(ARGS)

demo-vit: .venv/installed       ## train a vision transformer on handwritten digits: 2 pipeline ranks x 2 tensor ranks
	$(PY) examples/vit/train.py $(ARGS)

demo-huggingface: .venv/installed   ## train a LLaMA with transformers' Trainer: 2 pipeline ranks x 2 tensor ranks
	$(PY) examples/huggingface/demo.py $(ARGS)

lab: .venv/installed            ## run the Megatron lab: 2 tensor ranks, mock data, a checkpoint
	$(PY) examples/megatron_lab/lab.py $(ARGS)

# Number of processes that run the tests. With a third one on two cores, errors may take longer than the second they have.
JOBS ?= 2
SPREAD := --numprocesses $(JOBS) --dist worksteal
# Ranks are threads and processes: if each used all cores again, they would wait for one another.
test quick matrices drill wheel-test: export OMP_NUM_THREADS ?= 1
test: .venv/installed           ## run what pytest selects by itself: no exhaustive matrices, no drills, no lint
	$(PY) -m pytest $(SPREAD) $(ARGS)

PLANS := $(addprefix tests/,core analysis soundness orders schedules planning draw cli)
quick: .venv/installed          ## run the quick tests of what needs no torch, in a quarter of a minute
	$(PY) -m pytest $(SPREAD) -m "not slow and not lint" $(PLANS) $(ARGS)

matrices: .venv/installed       ## run the exhaustive matrices, or a part of them: make matrices ARGS="--share 0/6"
	$(PY) -m pytest $(SPREAD) -m exhaustive $(ARGS)

test-all: test matrices         ## run the test suite, then the exhaustive matrices

drill: .venv/installed          ## try for an hour what may fail rarely: kills, stops, damaged checkpoints, programs under NCCL's rules
	$(PY) -m pytest $(SPREAD) -m drill $(ARGS)

OUTSIDE := build/outside
SITE_OF_WHEEL := build/site
wheel-test: .venv/installed     ## the sdist and the wheel built from it have all files and the license, and pass quick tests
	rm -rf build
	$(PY) -c 'from setuptools import build_meta; build_meta.build_sdist("build")'
	mkdir $(OUTSIDE)
	tar --extract --file build/*.tar.gz --directory $(OUTSIDE) --strip-components 1
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir build/wheel $(OUTSIDE)
	$(PY) -m pip install --quiet --no-deps --target $(SITE_OF_WHEEL) build/wheel/*.whl
	for folder in benchmarks docs examples pipeflow tests; do \
	    diff --recursive --exclude=__pycache__ $$folder $(OUTSIDE)/$$folder || exit 1; done
	cd $(SITE_OF_WHEEL) && "$(CURDIR)/$(PY)" -m mypy --config-file= --cache-dir=/dev/null --follow-imports=silent \
	    -c 'from pipeflow.lightning.fabric import PipelineStrategy; from pipeflow.pipelining.schedules import Schedule1F1B'
	for stub in $$(cd $(SITE_OF_WHEEL)/pipeflow && ls *.py); do rm -rf $(SITE_OF_WHEEL)/pipeflow/$${stub%.py}; done  # see setup.py
	diff --recursive --exclude=__pycache__ pipeflow $(SITE_OF_WHEEL)/pipeflow
	cmp LICENSE $(OUTSIDE)/LICENSE
	cmp LICENSE $(SITE_OF_WHEEL)/pipeflow_torch-*.dist-info/licenses/LICENSE
	rm -r $(OUTSIDE)/pipeflow  # the tests of the source distribution run with the wheel
	cd $(OUTSIDE) && export PYTHONPATH="$(CURDIR)/$(SITE_OF_WHEEL)" && \
	"$(CURDIR)/$(PY)" -c 'import pipeflow, sys; assert pipeflow.__file__.startswith(sys.argv[1]), pipeflow' "$$PYTHONPATH/" && \
	"$(CURDIR)/$(PY)" -m pytest $(SPREAD) -m "not slow and not lint" tests/core tests/draw tests/cli tests/explore tests/test_*.py "$$PYTHONPATH/pipeflow" $(ARGS)

fuzz: .venv/installed           ## compare random configurations with plain torch: make fuzz ARGS=0:1000
	$(PY) -m tests.fuzz $(ARGS)

planted: .venv/installed        ## plant 200 faults in the package, one at a time, and count those that the tests find
	rm -rf build/covered
	$(PY) -m tests.planted record build/covered
	$(PY) -m tests.planted try build/covered $(ARGS)

check: .venv/installed          ## check lint of Python and JavaScript, types, layers, style, names and links in documents
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q -m lint tests/test_*.py

bench: .venv/installed          ## run every benchmark, side by side with other libraries
	$(PY) -m benchmarks $(ARGS)

stubs: .venv/installed          ## write the stubs of pipeflow.colossalai and pipeflow.megatron from their tables
	$(PY) -m tests.stubs

gallery: .venv/installed        ## write docs/schedules.md, its figures and those of docs/migration.md, and the list in docs/models.md
	$(PY) docs/gallery.py
	$(PY) docs/figures.py
	$(PY) docs/tried.py

TRL := build/trl
$(TRL)/installed: tests/huggingface/requirements.txt .venv/installed
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(TRL) -r $<
	touch $@

trl: $(TRL)/installed           ## test the trainers of TRL, which take 270 MB beside the environment
	PYTHONPATH=.:$(TRL) OMP_NUM_THREADS=1 $(PY) -m pytest $(SPREAD) -m "" tests/huggingface/test_trl.py $(ARGS)

OTHERS := build/others
$(OTHERS)/installed: tests/stages/others/requirements.txt .venv/installed
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(OTHERS) -r $<
	touch $@

others: $(OTHERS)/installed     ## train models of other libraries in a pipeline, and write docs/others.md: make others ARGS=timm
	PYTHONPATH=.:examples:$(OTHERS) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m tests.stages.others $(ARGS)

pictures: .venv/installed       ## make the pictures of the README, of docs/simulating.md and, with Chromium, of docs/explore.md
	$(PY) -m pipeflow compare gpipe 1f1b zb-v --ranks 4 --microbatches 8 --animate docs/pictures/flow.svg
	$(PY) docs/pictures.py
	$(PY) docs/shots.py

SITE := build/docs
docs: .venv/installed           ## build the documentation as a site in build/docs
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going docs $(SITE)
	@echo "open $(SITE)/index.html"

clean:                          ## remove .venv, builds and caches
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
