# make demo | test | check | docs | reliability | fuzz | prebuild | compat: each installs what it needs into .venv first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# torch, where an index offers it, without the gigabytes of CUDA that a CPU does not need
PIP := $(BIN)/python -m pip --disable-pip-version-check
TESTS ?= tests
WORKERS ?= 2
# Each worker keeps to a long run of tests, so that what a file's tests share is made once.
SPREAD := -n $(WORKERS) --dist worksteal

# Bytecode is kept, whatever the shell says: else each process that tests start takes 2.5 seconds more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test slow reliability sycl ocloc sycl-aot triton-xe tritons fuzz opinfo prebuild docs lint check compat clean
.DEFAULT_GOAL := test

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "== installing into $(VENV): torch, triton and the tools (a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile --progress-bar on --constraint constraints.txt torch setuptools
	$(PIP) install --no-compile --no-build-isolation --progress-bar on --constraint constraints.txt --editable '.[dev]'
	@# pip would compile every module there is, one after the other, for two minutes. One of torch's
	@# is of a later Python, which fails here and is imported by nobody.
	@cd $(VENV)/lib/python*/site-packages && ../../../bin/python -m compileall -qq -j 0 torch sympy triton || true
	@touch $@

demo: $(VENV)/installed
	@echo "== ResNet-50 and BERT-base: eager, Inductor and ipex side by side (6 to 8 minutes)"
	$(BIN)/ipex-inductor demo

quick: $(VENV)/installed
	$(BIN)/ipex-inductor demo --quick

test: $(VENV)/installed
	@echo "== all tests but the slow ones (20 to 30 minutes on 2 cores)"
	$(BIN)/python -m pytest $(TESTS) $(SPREAD) -m "not slow"

slow: $(VENV)/installed
	$(BIN)/python -m pytest $(TESTS) $(SPREAD) -m slow

# The kernel cache, and autotune records, under all that can be done to them: tests that are
# marked so; -rP shows the figures.
reliability: $(VENV)/installed
	$(BIN)/python -m pytest tests/aot_cache tests/autotune -m reliability \
	  -rP --show-capture=stdout

# Every kernel in SYCL on the CPU, in all its forms (a second each to compile).
sycl: $(VENV)/installed
	IPEX_TESTS_NEED_SYCL=1 $(BIN)/python -m pytest tests $(SPREAD) -k sycl -m "slow or not slow"

# Intel's compiler for its GPUs, unpacked beside the environment; nothing is installed.
OCLOC := $(VENV)/ocloc
ocloc: $(OCLOC)/ocloc
$(OCLOC)/ocloc: $(VENV)/installed
	benchmarks/common/ocloc.sh $(OCLOC)

# Every SYCL template as native code of six GPUs that are not here, against the static gate: nightly,
# half an hour on 2 cores.
sycl-aot: $(OCLOC)/ocloc
	PATH="$$PATH:$(abspath $(OCLOC))" $(BIN)/python -m benchmarks sycl_aot $(AOT)

# The Triton templates that Intel's GPUs are offered, by Intel's Triton (a beta, 182 MB, in an
# environment of its own) and ocloc, against the same gate: half an hour on 2 cores.
TRITON_XE := $(VENV)/triton-xe
triton-xe: $(OCLOC)/ocloc
	$(PYTHON) -m venv $(TRITON_XE)
	$(TRITON_XE)/bin/python -m pip install --no-deps --pre triton-xpu==3.3.0b1 setuptools
	PATH="$$PATH:$(abspath $(OCLOC))" $(BIN)/python -m benchmarks triton_xe \
	  --triton $(TRITON_XE)/bin/python $(AOT)

# The kernels of the package's table by the Tritons of all torches that we support, to be run on a GPU
# by `python -m benchmarks other_tritons use .venv/tritons/kernels`: a quarter of an hour, 4 GB.
TRITONS := $(VENV)/tritons
tritons: $(VENV)/installed
	for version in 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0; do \
	  $(PIP) install --no-deps --upgrade --target $(TRITONS)/$$version triton==$$version || exit; done
	$(BIN)/python -m benchmarks other_tritons build $(TRITONS)/kernels --triton $(TRITONS)/3.*

# 10,000 random programs against their twins in float64, forward and backward, 120 of them compiled.
FUZZ ?= --programs 10000 --compiled 120
fuzz: $(VENV)/installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

# Torch's own case lists (OpInfo, ModuleInfo) held to eager, or a share of them: `make opinfo
# SHARD=3/8`. Rows are appended to a file, and a later call goes on where this one stopped.
SHARD ?= 1/1
OPINFO ?= --results opinfo.jsonl
opinfo: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m opinfo --shard $(SHARD) $(OPINFO)

# Every kernel of some models for GPUs that are not here: 15 minutes and 6 GB at most.
prebuild: $(VENV)/installed
	$(BIN)/python -m benchmarks prebuild_ci

# The documentation site, into build/site; a broken link or anchor is an error. It opens from disk.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	! git grep -nE '^(<{7}|>{7}) '

check: lint docs
	$(BIN)/python -m pytest $$(grep -rl --include='test_*.py' pytest.mark.unit tests) \
	  $(SPREAD) -q -m "unit and not slow"

# The suite with every torch we support, in environments of their own outside the checkout.
compat:
	benchmarks/studies/compat.sh

clean:
	rm -rf $(VENV) build dist *.egg-info
