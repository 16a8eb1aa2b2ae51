# Everything runs in .venv, which `make setup` fills from pyproject.toml with the versions of constraints.txt.
# Any other environment can be used instead: make test VENV=/path/to/venv

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out
JOBS ?= 2
MARKS ?= not acceptance and not gpu
# Where what was measured on a GPU is written.
RESULTS ?= benchmarks/results
# It pins TensorRT-RTX below the 1.7.1 that builds INT8 convolutions, and works beside it.
FRONTEND := torch-tensorrt-rtx==2.14.0 dllist==2.0.0
# Modules of the programs, what needs a GPU, another checkout, the zoo or arguments, and what writes a file of the docs.
NO_FIGURES := $(addprefix benchmarks/,compare_checkouts.py gpu.py gpu_page.py photos.py random_models.py rtx_loads.py \
	accuracy.py accuracy_page.py build_time.py calibrators.py fetch_zoo.py devices.py engines.py fp8.py fp8_emulation.py peers.py \
	quantized_onnx.py rtx_options.py scale.py sizes.py support_matrix.py zoo.py zoo_networks.py)
BROWSER := command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable
INSTALL_BROWSER := apt-get install chromium
# Trained networks and photographs.
ZOO ?= data/zoo
DIGITS := data/digits/resnet.safetensors

.DEFAULT_GOAL := help
.PHONY: help setup browser quickstart test test-random test-gpu fmt lint type bench bench-calibration bench-accuracy \
	bench-build bench-scale bench-sizes bench-gpu schema dist clean

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

# An environment named with VENV= is taken as it is.
ifeq ($(VENV),.venv)
SETUP := $(VENV)/.installed

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python: must be 3.11 or later (got %d.%d). Run: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[build,rtx,examples,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(FRONTEND)
	touch $@
endif

setup: $(SETUP)  ## Make .venv with everything that building, checking and testing need.
	@$(BROWSER) >/dev/null || echo "no Chromium here: the tests of the report in a browser will be skipped. Install it: $(INSTALL_BROWSER)"

browser:  ## Install the browser that the tests of the report look at it with (Debian and Ubuntu; as root).
	@$(BROWSER) || (apt-get update && $(INSTALL_BROWSER) -y --no-install-recommends fonts-dejavu-core)

$(DIGITS): | $(SETUP)
	$(BIN)/python -m trtpipe.examples.digits make data/digits

quickstart: $(SETUP) $(DIGITS)  ## Build configs/quickstart.yaml: digits, INT8, TensorRT-RTX, no GPU needed.
	$(BIN)/python -m trtpipe build configs/quickstart.yaml -o $(OUT)

# Two processes of one thread each are faster than one of two: most of a test is Python.
test: $(SETUP)  ## Run the tests, but those marked acceptance or gpu; MARKS='not gpu' adds acceptance.
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m '$(MARKS)' $(ARGS)

test-random: $(SETUP)  ## Run the property tests on other examples each time, which CI does not.
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m 'hypothesis and not gpu' $(ARGS)

test-gpu: $(SETUP)  ## Run the tests that need an NVIDIA GPU; without one they fail.
	TRTPIPE_REQUIRE_GPU=1 TRTPIPE_RESULTS="$(RESULTS)" $(BIN)/python -m pytest -m gpu $(ARGS)

fmt: $(SETUP)  ## Format the code and sort its imports.
	$(BIN)/ruff check --select I --fix --quiet .
	$(BIN)/ruff format .

lint: $(SETUP)  ## Check style and who imports whom.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(SETUP)  ## Check types: mypy --strict on both packages and the benchmarks.
	$(BIN)/mypy

bench: $(SETUP)  ## Run the programs in benchmarks/, which print figures.
	@for program in $(filter-out $(NO_FIGURES),$(wildcard benchmarks/*.py)); do echo "== $$program"; $(BIN)/python $$program || exit 1; done

bench-calibration: $(SETUP)  ## Calibration beside ONNX Runtime's, in one run on a quiet machine.
	$(BIN)/python benchmarks/calibration.py $(ARGS)

$(ZOO)/manifest.json: | $(SETUP)
	$(BIN)/python benchmarks/fetch_zoo.py $(ZOO)

bench-accuracy: $(SETUP) $(ZOO)/manifest.json  ## INT8 on trained networks, beside other tools (PEER_PYTHON=...); hours.
	ZOO="$(ZOO)" $(BIN)/python benchmarks/accuracy.py $(ARGS)

bench-build: $(SETUP)  ## Where the time of a build goes, beside the parts that no tool can leave out; on a quiet machine.
	$(BIN)/python benchmarks/build_time.py $(ARGS)

bench-scale: $(SETUP)  ## How a build's cost grows with nodes, weights and images, a night's with jobs and workers; an hour.
	$(BIN)/python benchmarks/scale.py $(ARGS)

bench-sizes: $(SETUP)  ## Sizes of FP16 and INT8 engines of ten networks, without a GPU.
	$(BIN)/python benchmarks/sizes.py $(ARGS)

bench-gpu: $(SETUP)  ## Four networks in every mode on this GPU, and whether TensorRT-RTX runs here; into RESULTS.
	$(BIN)/python benchmarks/rtx_loads.py --results "$(RESULTS)"
	$(BIN)/python benchmarks/gpu.py --results "$(RESULTS)" $(ARGS)

schema: $(SETUP)  ## Write what is generated from the job file's models: its JSON Schema and its page in the docs; docs/versions.md.
	$(BIN)/python -m trtpipe schema > configs/job.schema.json
	$(BIN)/python -m trtpipe schema --markdown > docs/job-file.md
	$(BIN)/python -c "import json; from trtpipe.trt.versions import document; \
	    print(document(json.load(open('docs/rtx-options.json'))), end='')" > docs/versions.md

dist: $(SETUP)  ## Make the wheel and the sdist of the last commit in dist/.
	@test -z "$$(git status --porcelain 2>/dev/null)" || { echo "dist: commit or remove what git status names: the release would lack it"; exit 2; }
	@source=$$(mktemp -d) && trap 'rm -rf "$$source"' EXIT && git archive HEAD | tar -x -C "$$source" && \
	    cd "$$source" && $(abspath $(BIN))/python -m hatchling build -d $(CURDIR)/dist

clean:  ## Remove what was built and made, but not .venv.
	rm -rf $(OUT) build dist data/digits .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
