# make demo        simulates two volumes, trains on them and reports the result; the next one trains in a new directory,
#                  runs/demo/<ranks>ranks/00-2, and after an interruption it resumes
# make test        runs the fast tests: every feature once, in about six minutes on two cores
# make test-slow   runs the slow tests: 32 kills at random times, Slurm jobs, all combinations of options
# make check       runs linters, type checks and checks of shell files
# make coverage    runs all tests with branch coverage
# make soak N=100  kills ranks N times at random times, restarts them and compares the results bit by bit: about 3 s per
#                  kill. LAUNCHERS=plain,torchrun,srun gives each launcher an equal share (about 8 s per kill of the last
#                  two); srun starts a private two-node Slurm, as root on Debian. Then trains RUNS=20 times with random
#                  configs and random stops, and compares the results with uninterrupted runs: about 15 s per run
# make bench-cpu   measures the speed of a training step with sets of options on this CPU: about 5 minutes
# make bench-gpu CALL=1   runs a third of the GPU benchmarks, at most 8 minutes: 1 each convolution, and the fastest
#                  options; 2 the tests that need a GPU; 3 Adam and SOAP, predictions, loaders, single options. Uses python3
#                  without an installation if make install was not run. BENCH: other arguments of benchmarks/step.py,
#                  for example BENCH="--dry_run"
# make docs        writes the tables of flags, config keys and results into README.md and docs/
#
# PYTHON  the interpreter for the virtual environment; if it has torch, the environment uses that torch
# TORCH   otherwise the arguments of pip to install torch. For a machine without a GPU, PyTorch's "Get started" page
#         gives the index of the CPU builds: TORCH="torch==2.13.0 --index-url ..."

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-test
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
DEMO_DATA := data/demo_train.h5 data/demo_val.h5
SHELL_FILES := .ci/run $(wildcard *.sh tests/slurm/*.sh)
N ?= 100
RUNS ?= 20
LAUNCHERS ?= plain
CALL ?= 1

.PHONY: demo docs test test-slow coverage check soak record bench-cpu bench-gpu install clean

demo: $(READY) $(DEMO_DATA)
	@# The number of ranks must divide the demo's batch of 4.
	@ranks=$$($(BIN)/python -c "import torch; n = torch.cuda.device_count() or 2; print(max(r for r in (1, 2, 4) if r <= n))"); \
	$(BIN)/python -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=$$ranks train.py --config=demo

data/demo_train.h5: BOX = --grid 128 --seed 1
data/demo_val.h5: BOX = --grid 96 --seed 2
$(DEMO_DATA): | $(READY)
	$(BIN)/python -m simulation --output $@ $(BOX) --overwrite

# All tests of a file run in one process, so that shared fixtures, such as a Slurm cluster, are created once. Two
# processes per core, because many tests wait for ranks.
PYTEST := pytest -n $(shell echo $$(( $(CORES) < 4 ? 2 * $(CORES) : 8 ))) --dist loadfile --no-loadscope-reorder

# Containers often set this variable; then each of many processes compiles the program again.
test test-slow: export PYTHONDONTWRITEBYTECODE =

test: $(TEST_READY)
	$(BIN)/python -m $(PYTEST) -m "not slow"

test-slow: $(TEST_READY)
	$(BIN)/python -m $(PYTEST) -m slow

# The settings are in pyproject.toml. About ten tests that compare the whole output of a process fail here, because
# coverage prints a traceback if a script calls its exit functions itself.
coverage: export COVERAGE_TOP = $(CURDIR)
coverage: export COVERAGE_PROCESS_START = $(CURDIR)/pyproject.toml
coverage: $(TEST_READY)
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m $(PYTEST)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered

check: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	PATH="$(BIN):$$PATH" shellcheck $(SHELL_FILES)
	PATH="$(BIN):$$PATH" shfmt -d -i 2 $(SHELL_FILES)
	PATH="$(BIN):$$PATH" hadolint docker/Dockerfile

docs: $(READY)
	$(BIN)/python -m docs.generate

soak: $(TEST_READY)
	$(BIN)/python tests/soak.py $(N) --launchers=$(LAUNCHERS) --runs=$(RUNS)

bench-cpu: $(TEST_READY)
	$(BIN)/python -m benchmarks.step

# The newest row of the record again; RECORD="--peer DIR": all rows.
record: $(TEST_READY)
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.record $(RECORD)

# Installs nothing, because a machine with a GPU may have no network.
bench-gpu:
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m benchmarks.step --call $(CALL) $(BENCH)

install: $(TEST_READY)

# If $(PYTHON) has torch, the new environment can import the packages of $(PYTHON), and a constraint keeps pip from
# replacing torch.
$(READY): pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit('Python 3.10 or later is needed, this is ' + sys.version.split()[0] if sys.version_info < (3, 10) else 0)"
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
	  echo "using the installed PyTorch"; \
	  $(PYTHON) -c "import os, torch; print(os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))))" \
	    > "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/outer.pth"; \
	elif ! $(BIN)/python -c "import torch" 2>/dev/null; then \
	  echo "installing $(TORCH)"; \
	  $(BIN)/python -m pip install --quiet $(TORCH); \
	fi
	@echo "installing the dependencies of pyproject.toml"
	@$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[dev,digits]"
	@# The torchrun of another environment would start that environment's interpreter, which lacks the dependencies.
	@test -x $(BIN)/torchrun || { printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$$@"\n' \
	  "$$($(BIN)/python -c 'import sys; print(sys.executable)')" > $(BIN)/torchrun && chmod +x $(BIN)/torchrun; }
	@touch $@

# Optional packages that the tests need. Only missing ones are installed, to keep the builds of a container.
$(TEST_READY): $(READY)
	@for part in nvidia.dali:dali triton:triton wandb:wandb pandas:notebook; do \
	  $(BIN)/python -c "import $${part%:*}" 2>/dev/null && continue; \
	  echo "installing the extra $${part#*:}"; \
	  $(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[$${part#*:}]" || exit 1; \
	done
	@touch $@

clean:
	rm -rf $(VENV) data/demo_train.h5 data/demo_val.h5 data/demo_*.npy .pytest_cache .mypy_cache .ruff_cache *.egg-info
