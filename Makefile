# Every target sets up what it needs: a virtual environment in .venv, filled once, by a pip that chooses in six
# tenths of the time of the one that Python 3.11 brings.
PYTHON ?= python3
VENV := .venv
# Modules are compiled when one is first imported: neither all when they are installed, nor ours by each process.
unexport PYTHONDONTWRITEBYTECODE
# What is installed can be edited, of which setuptools would warn in ten lines.
PIP := PYTHONWARNINGS=ignore $(VENV)/bin/pip --quiet --disable-pip-version-check install --no-compile -c constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/ready

# The tests of cuDNN run on its real library, without a GPU: two wheels of 0.8 GB, for Linux on x86-64 only.
DEVICELESS ?= $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),yes,no)
CUDNN := $(VENV)/cudnn

# Asked for both, cuDNN is added beside the checks, and the tests begin when these have passed.
ifeq ($(sort $(MAKECMDGOALS)),check test)
MAKEFLAGS += --jobs=2
test: check
endif

.PHONY: help run proof test test-all check bench bench-cpu models gpu record gpu-steps gpu-layers gpu-rest clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mucudnn needs Python 3.11 or later, but $(PYTHON) is " + sys.version.split()[0])'
	@echo "setting up $(VENV), once: a minute, or more while PyTorch is downloaded"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) pip
	@$(PIP) -e '.[test,bench]'
	@touch $(READY)

run: $(READY)  ## tune a ResNet-18 on real images, divide its convolutions, prove that nothing changed
	@$(BIN)/python -m bench.digits $(ARGS)

proof: $(READY)  ## train with and without division from equal weights; needs the plan that run wrote
	@$(BIN)/python -m bench.proof $(ARGS)

$(CUDNN): $(READY) constraints-cudnn.txt
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
		echo "cuDNN is the one that this CUDA build of PyTorch brings"; \
	else \
		echo "adding cuDNN (once, 0.8 GB; DEVICELESS=no goes without it)"; \
		$(PIP) -c constraints-cudnn.txt -e '.[deviceless]'; \
	fi
	@touch $(CUDNN)

test: $(READY) $(if $(filter yes,$(DEVICELESS)),$(CUDNN))  ## run the test suite; DEVICELESS=no leaves out the real cuDNN
	@$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(if $(filter yes,$(DEVICELESS)),,--no-deviceless) $(BREADTH) $(ARGS)

test-all: BREADTH := --thorough
test-all: test  ## the same with whole products of parameters and more random networks

check: $(READY)  ## format, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(READY) $(if $(filter yes,$(DEVICELESS)),$(CUDNN))  ## measure the solvers, and what a patched call and a launch cost the host
	@$(BIN)/pytest bench $(if $(filter yes,$(DEVICELESS)),,--ignore=bench/bench_launches.py) --benchmark-enable --benchmark-only -o python_files='bench_*.py' -o timeout=0

bench-cpu: $(READY)  ## measure convolution layers and training steps on the processor, an hour and more; goes on where it stopped
	@$(BIN)/python -m bench.cpu $(ARGS)

# Packages of models, without what they ask for and do not need here: a torchvision would bring a torch of its own.
MODELS := $(VENV)/models

$(MODELS): $(READY)
	@$(PIP) transformers
	@$(PIP) --no-deps pytorchcv monai
	@touch $(MODELS)

models: $(MODELS)  ## train public models divided, beside their unpatched twins; an hour
	@$(BIN)/python -m bench.models $(ARGS)

# Beside the Python that has a CUDA build of torch, which stays as it is; only what is missing is added.
GPU := build/gpu
# As a user trains; apart from the others, since one fault of a card fails all that its process does later.
GPU_TRAINING := tests/test_training_on_gpu.py
GPU_FIRST := tests/comparing/test_steps.py tests/cli/test_info.py tests/cudnn/test_gpu.py
GPU_TESTS = $(GPU_FIRST) $(sort $(filter-out $(GPU_FIRST) $(GPU_TRAINING), \
	$(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)))
# In processes of their own, which leave most of the card to each other: their time is the host's.
TESTS_N ?= 8
# Seconds after which no further test begins; whoever has more time for them says so.
TRAINING_S ?= 120
TESTS_S ?= 110
gpu_tests = PYTHONUNBUFFERED=1 timeout --foreground --signal=INT --kill-after=10 $$(($(1) + 20)) \
	$(GPU)/bin/python -m pytest -m gpu --require-gpu -v --tb=short --junitxml=$(GPU)/$(2).xml \
	-o session_timeout=$(1) -o timeout=60 -o timeout_method=signal -o faulthandler_timeout=30 -W default $(3)

# Once, whatever the times of files say, which are new where a copy of the repository is lent a card again.
$(GPU)/ready:
	@$(PYTHON) -m bench.gpu.install $(GPU) $(WHEELS)
	@touch $(GPU)/ready

gpu:  ## test and measure on an NVIDIA GPU, nine minutes; WHEELS=folder goes without a network
	@$(PYTHON) -m bench.gpu.available
	@$(MAKE) --no-print-directory $(GPU)/ready
	@rm -f $(GPU)/*.xml
	@$(call gpu_tests,$(TRAINING_S),training,$(GPU_TRAINING)); training=$$?; \
		$(call gpu_tests,$(TESTS_S),tests,--numprocesses $(TESTS_N) $(GPU_TESTS)); tests=$$?; \
		$(GPU)/bin/python -m bench.gpu $(ARGS) && exit $$((training | tests))

record:  ## tune networks on an NVIDIA GPU into one recording, which can be replayed; goes on where it stopped
	@$(PYTHON) -m bench.gpu.available
	@$(MAKE) --no-print-directory $(GPU)/ready
	@$(GPU)/bin/python -m bench.record $(ARGS)

gpu-steps:  ## whole training steps on an NVIDIA GPU, PyTorch's own ways and ours (after record)
	@$(PYTHON) -m bench.gpu.available
	@$(MAKE) --no-print-directory $(GPU)/ready
	@$(GPU)/bin/python -m bench.gpu.steps $(ARGS)

gpu-layers:  ## convolution layers on an NVIDIA GPU, PyTorch's own ways and ours at every limit; goes on where it stopped
	@$(PYTHON) -m bench.gpu.available
	@$(MAKE) --no-print-directory $(GPU)/ready
	@$(GPU)/bin/python -m bench.gpu.layer_run $(ARGS)

gpu-rest:  ## there: what no card has shown yet, in its order, eight minutes of it; WHEELS as for gpu
	@$(PYTHON) -m bench.gpu.available
	@$(MAKE) --no-print-directory $(GPU)/ready
	@$(GPU)/bin/python -m bench.gpu.rest $(ARGS)

clean:  ## remove the virtual environment, build/ and what tools keep here
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find bench mucudnn tests -name __pycache__ -prune -exec rm -rf {} +
