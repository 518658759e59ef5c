# make demo    train a small language model in float16
# make check   lint, types and the quick tests of what compiles nothing: for use while you work
# make test    lint, types, and tests of every part; TORCH=2.11.0 for another torch, in its own environment
# make test-all    the same with all cases of the tests
# make test-newest  a part of the tests on the newest torch, in an environment of its own: about ten minutes
# make docs    the site, from docs/ into site/; a warning is an error
# make bench   measure on this machine's CPU: over an hour; results under benchmarks/results
# make fuzz    random trainings along torch's loop, the eager step and the compiled one: SEEDS=0:200 BACKEND=inductor
# make peers   the rules of jmp, flax, Keras, DeepSpeed and torchao against the packages themselves
# make package build the wheel and the source archive, and check what is in them and that the wheel works
# make gpu     the CUDA tests and benchmarks, with the Python at hand: it installs nothing. In parts of at most 8 minutes:
#              make gpu-tests gpu-step gpu-phase gpu-price gpu-rest; and gpu-verify gpu-public gpu-bfloat16 gpu-large gpu-rl
#              gpu-float8 gpu-parity gpu-sanitize gpu-roofline

PYTHON ?= python3
PINNED := 2.13.0
NEWEST := 2.15.0
TORCH ?= $(PINNED)
VENV := .venv-$(TORCH)
BIN := $(VENV)/bin
CXX_FOUND := $(shell command -v $${CXX:-c++} || command -v g++ || command -v clang++)
RESULTS ?= benchmarks/results
DEVICE ?= cuda
SEEDS ?= 0:200
BACKEND ?= eager
MODELS := timm torchvision transformers tokenizers regex peft
# TRL and what it needs of its own. It needs Python 3.11.
MODELS += $(foreach name,trl datasets dill multiprocess pandas pyarrow xxhash,"$(name); python_version >= '3.11'")
MODELS_TESTS := $(addprefix tests/, $(addprefix examples/, test_tutorials.py test_clients.py) $(addprefix amp/, test_trainers.py test_timm.py) \
	autograd/test_peft.py report/test_clients.py)
PART := $(addprefix tests/,scaler rules optim step trace jit cpu upstream float8/test_product.py)
PART_PROGRAMS := $(addprefix tests/,upstream/test_upstream.py gpu_program/test_counted.py \
	$(addprefix jit/test_,captured_tensors.py whole_operations.py permutations.py memory.py))
SELECT := not cuda and not peers and not models$(if $(CXX_FOUND),, and not inductor)
SELECT_MODELS := models$(if $(CXX_FOUND),, and not inductor)
# mypy uses the stubs of the pinned torch.
LINT := $(if $(filter $(PINNED),$(TORCH)),lint)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Without the policy the OpenMP threads of the test processes spin: twice the time for `make check`.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -n auto --maxprocesses 4
BY_FILE := --dist loadfile --no-loadscope-reorder
PYTEST_MODELS = PYTHONPATH=$(VENV)/models $(PYTEST) $(BY_FILE)

GPU := gpu $(addprefix gpu-,tests step phase price rest verify public bfloat16 large rl float8 parity sanitize roofline)
.PHONY: help demo check run-check test test-all run-test run-test-all test-newest part lint docs bench fuzz peers package $(GPU) clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/installed
	$(BIN)/python examples/train_gpt.py $(ARGS)

# The lint runs beside the tests, which leave a core idle now and then.
check: $(VENV)/installed
	$(MAKE) --jobs 2 lint run-check

run-check: $(VENV)/installed
	$(PYTEST) $(BY_FILE) -m "$(SELECT) and not inductor and not compiled and not processes and not slow and not rest" $(ARGS)

test: $(VENV)/installed $(VENV)/models/installed
	$(MAKE) --jobs 2 $(LINT) run-test

test-all: $(VENV)/installed $(VENV)/models/installed
	$(MAKE) --jobs 2 $(LINT) run-test-all

# The packages of models are on the path of their own tests only: Lightning imports any torchvision that it finds, and the
# import fails if that was built for another torch.
run-test: CASES := and not rest
run-test-all: CASES :=
run-test run-test-all: $(VENV)/installed $(VENV)/models/installed
	@$(if $(CXX_FOUND),,echo "No C++ compiler: leaving out the tests marked inductor (install g++ to run them).")
	$(PYTEST) $(BY_FILE) -m "$(SELECT) $(CASES)" $(ARGS)
	$(PYTEST_MODELS) -m "$(SELECT_MODELS) $(CASES)" $(MODELS_TESTS)

# `pip install` brings a user the newest torch, so a change is tested with it too: every rule of a step, and a few programs.
test-newest:
	$(MAKE) part TORCH=$(NEWEST)

part: $(VENV)/installed
	$(PYTEST) $(BY_FILE) -m "$(SELECT) and not inductor and not processes and not slow" $(PART) $(ARGS)
	$(if $(CXX_FOUND),$(PYTEST) $(BY_FILE) -m "$(SELECT) and inductor" $(PART_PROGRAMS) $(ARGS))

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Not --quiet: it hides warnings from --strict too.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# From Python 3.11 on. mkdocstrings reads the sources and imports nothing: the extra without the package and torch.
.venv-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	sed -n '/^docs = /s/[^"]*"\([^"]*\)"[^"]*/\1\n/gp' pyproject.toml > .venv-docs/requirements.txt
	.venv-docs/bin/pip install --quiet --constraint constraints.txt --requirement .venv-docs/requirements.txt
	touch $@

bench: $(VENV)/installed $(VENV)/models/installed
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/pip install --quiet --editable '.[bench]'
	$(BIN)/python benchmarks/step.py --out $(RESULTS) $(ARGS)
	$(BIN)/python benchmarks/step.py --out $(RESULTS) --forms --sizes "MLP 0.14 M;MLP 3.2 M;MLP 38 M"
	PYTHONPATH=$(VENV)/models $(BIN)/python benchmarks/step.py --out $(RESULTS) --public
	$(BIN)/python benchmarks/rl.py --out $(RESULTS)
	$(BIN)/python benchmarks/phase.py --out $(RESULTS)
	$(BIN)/python benchmarks/price.py --out $(RESULTS)
	$(BIN)/python benchmarks/guard.py --out $(RESULTS)
	$(BIN)/python benchmarks/footprint.py --out $(RESULTS)
	$(BIN)/python benchmarks/python_stack.py --out $(RESULTS)
	$(BIN)/python benchmarks/track.py --out $(RESULTS)
	$(BIN)/python benchmarks/ranks.py --out $(RESULTS)
	$(BIN)/python benchmarks/scaling_model.py --out $(RESULTS)
	$(BIN)/python benchmarks/gpu_program.py --out $(RESULTS)
	$(BIN)/python benchmarks/overhead.py --out $(RESULTS)
	$(BIN)/python benchmarks/grad_scaler.py --out $(RESULTS)
	$(BIN)/python benchmarks/auditor.py --out $(RESULTS)
	$(BIN)/python benchmarks/float8.py --out $(RESULTS)
	$(BIN)/python benchmarks/float16_rl.py --out $(RESULTS)
	$(BIN)/python benchmarks/parity.py --out $(RESULTS)
	$(BIN)/python docs/hooks.py

fuzz: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(SEEDS) --backend $(BACKEND)

# Needs Python 3.11. DeepSpeed's scaler is one file of plain Python, so its dependencies are not installed.
peers:
	$(PYTHON) -m venv .venv-peers
	PIP_CONSTRAINT=constraints.txt .venv-peers/bin/pip install --quiet --editable '.[peers]'
	PIP_CONSTRAINT=constraints.txt .venv-peers/bin/pip install --quiet --no-deps deepspeed==0.19.8
	KERAS_BACKEND=torch .venv-peers/bin/python -m pytest -q -m peers tests/peers $(ARGS)

package:
	$(PYTHON) -m venv .venv-package
	PIP_CONSTRAINT=constraints.txt .venv-package/bin/pip install --quiet build twine
	rm -rf dist
	.venv-package/bin/python -m build
	.venv-package/bin/twine check --strict dist/*
	PIP_CONSTRAINT=constraints.txt .venv-package/bin/python .github/check_package.py dist

# DEVICE=cpu SIZES="..." ROUNDS=2 rehearse a part where there is no GPU.
$(GPU):
	$(PYTHON) benchmarks/gpu.py $(patsubst gpu-%,%,$(filter gpu-%,$@)) --device $(DEVICE) --out $(RESULTS) \
		$(if $(SIZES),--sizes '$(SIZES)') $(if $(ROUNDS),--rounds $(ROUNDS))

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/$(if $(filter $(PINNED),$(TORCH)),,;/^triton==/d)' constraints.txt > $(VENV)/constraints.txt
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/pip install --quiet --editable '.[demo,plot,test,clients,dev]'
	touch $@

# Not their dependencies: torch is installed, and no torchvision may replace it.
$(VENV)/models/installed: $(VENV)/installed
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/pip install --quiet --upgrade --no-deps --target $(@D) $(MODELS)
	touch $@

clean:
	rm -rf .venv-* dist demo-out site .pytest_cache .mypy_cache .ruff_cache .hypothesis
