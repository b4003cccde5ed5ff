# make demo    simulate two boxes, train on them, show what came out
# make test    every feature once, within five minutes on two cores
# make test-slow   what takes longer: 20 kills at random moments, all that Slurm does to a job, exhaustive combinations
# make check   linters, types, shell files
# make coverage    both parts of the test suite with branch coverage
# make soak N=100   kills ranks at random moments, starts them again, compares bits: about 5 s a kill
# make bench-cpu   the optimisation ladder and the loop's overhead on this machine's CPU: about 9 minutes
# make bench-gpu   all that a GPU has to tell, 8 minutes; takes the python3 that is there if make install was not run
#                  (BENCH="--minutes 4" and the like: arguments of benchmarks/gpu.py)
#
# PYTHON  the interpreter to start from; where it already has torch, that torch is used
# TORCH   what to install where there is none, as pip takes it (on a machine without a GPU, PyTorch's
#         "Get started" page names the index of its CPU builds: TORCH="torch==2.13.0 --index-url ...")

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

.PHONY: demo test test-slow coverage check soak bench-cpu bench-gpu install clean

demo: $(READY) $(DEMO_DATA)
	@# The demo's batch of 8 is divided evenly.
	@ranks=$$($(BIN)/python -c "import torch; n = torch.cuda.device_count() or 2; print(max(r for r in (1, 2, 4, 8) if r <= n))"); \
	threads=$$(( $(CORES) / ranks > 0 ? $(CORES) / ranks : 1 )); \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$threads} \
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$$ranks train.py --config=demo --resume=no

data/demo_train.h5: SEED = 1
data/demo_val.h5: SEED = 2
$(DEMO_DATA): | $(READY)
	$(BIN)/python -m utils.simulation --output $@ --grid 128 --seed $(SEED) --overwrite

# The tests of a file stay in one process: what they share, such as a Slurm, is made once.
PYTEST := pytest -n $(shell echo $$(( $(CORES) < 4 ? $(CORES) : 4 ))) --dist loadfile --no-loadscope-reorder

test: $(TEST_READY)
	$(BIN)/python -m $(PYTEST) -m "not slow"

test-slow: $(TEST_READY)
	$(BIN)/python -m $(PYTEST) -m slow

# The settings are in pyproject.toml. Some ten tests that compare all that a process prints fail here, since coverage
# prints a traceback where a script calls its exit functions itself.
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

soak: $(TEST_READY)
	$(BIN)/python tests/soak.py $(N)

bench-cpu: $(TEST_READY)
	$(BIN)/python -m benchmarks.ladder
	$(BIN)/python -m benchmarks.loop_overhead

# Whoever has a GPU for a few minutes may have no network: what is there is used, nothing is installed.
bench-gpu:
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m benchmarks.gpu $(BENCH)

install: $(TEST_READY)

# The new environment sees the packages of the one it was made from when that has torch, and the constraint keeps
# pip from replacing it.
$(READY): pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit('Python 3.10 or later is needed, this is ' + sys.version.split()[0] if sys.version_info < (3, 10) else 0)"
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
	  echo "using the PyTorch that is there"; \
	  $(PYTHON) -c "import os, torch; print(os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))))" \
	    > "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/outer.pth"; \
	elif ! $(BIN)/python -c "import torch" 2>/dev/null; then \
	  echo "installing $(TORCH)"; \
	  $(BIN)/python -m pip install --quiet $(TORCH); \
	fi
	@echo "installing what pyproject.toml lists"
	@$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[dev,digits]"
	@# A torchrun that lies outside would start the interpreter outside, which lacks the rest.
	@test -x $(BIN)/torchrun || { printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$$@"\n' \
	  "$$($(BIN)/python -c 'import sys; print(sys.executable)')" > $(BIN)/torchrun && chmod +x $(BIN)/torchrun; }
	@touch $@

# What is optional in use, but tested: each only where it is missing, so that a container's own build stays in place.
$(TEST_READY): $(READY)
	@for part in nvidia.dali:dali triton:triton; do \
	  $(BIN)/python -c "import $${part%:*}" 2>/dev/null && continue; \
	  echo "installing the extra $${part#*:}"; \
	  $(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[$${part#*:}]" || exit 1; \
	done
	@touch $@

clean:
	rm -rf $(VENV) data/demo_train.h5 data/demo_val.h5 data/demo_*.npy .pytest_cache .mypy_cache .ruff_cache *.egg-info
