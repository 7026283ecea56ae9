# make demo [TASK=prs_med|mimic_cxr|survival|cascade|compressed_ad]  set up, write sample data, train, print the table
#      ENGINE=--torchrun     train mimic_cxr with DDP; by default the launcher chooses DeepSpeed ZeRO-2
# make test                  set up, run the test suite
# make test-quick            test losses, metrics, data, samplers, checkpoints, flags, launchers, and one killed run
# make soak                  run the long tests with injected faults and repetitions
# make gpu                   measure and check what depends on a GPU (on a CPU: tiny sizes); see benchmarks/gpu.py
#      FLAGS="--minutes 9"   its flags; PYTHON=python3 uses that Python instead of creating .venv
# make versions PYTHON=python3.12 WITH="torch==2.11.0 transformers==5.17.0"   test other versions in .venv-versions
#      with test-quick and make gpu at tiny sizes; all other packages as pinned
# make lint                  ruff, shellcheck, shfmt
PYTHON ?= python3
TASK ?= prs_med
VENV ?= .venv
BIN := $(VENV)/bin
SHELL_FILES := run_multi_gpu_train.sh launch_distributed_training.sh train_4gpu.sh $(wildcard configs/slurm/*.sbatch) .ci/run
PROCESSES = $$($(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)")

# PYTHON given on the command line already has torch, so `make gpu` works without network and .venv.
GIVEN := $(filter command line,$(origin PYTHON))

# AVX-512 kernels sum in another order; limited to AVX2, the demos print the numbers in the documentation.
ifneq (,$(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null))
demo demo-all: export ATEN_CPU_CAPABILITY := avx2
demo demo-all: export ONEDNN_MAX_CPU_ISA := AVX2
demo demo-all: export NPY_DISABLE_CPU_FEATURES := X86_V4 AVX512_ICL AVX512_SPR
endif

.PHONY: demo demo-all test test-quick soak gpu versions lint setup setup-dev
setup: $(VENV)/requirements.txt
	@echo "ready; type: source $(BIN)/activate"
setup-dev: $(VENV)/requirements-dev.txt

$(VENV)/%.txt: requirements.txt requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $*.txt
	cp $*.txt $@

demo: setup
	rm -rf data/demo/$(TASK) runs/demo/$(TASK)
	$(MAKE) --no-print-directory demo-$(TASK)

demo-prs_med:
	$(BIN)/python -m tools.sample_data prs_med data/demo/prs_med
	processes=$(PROCESSES) && \
	PATH="$(CURDIR)/$(BIN):$$PATH" ./run_multi_gpu_train.sh data/demo/prs_med $$processes -- \
	    --config configs/prs_med_demo.yaml --batch_size $$((32 / processes))

demo-mimic_cxr: D := data/demo/mimic_cxr
demo-mimic_cxr:
	$(BIN)/python -m tools.sample_data mimic_cxr data/demo/mimic_cxr
	$(BIN)/python -m tools.prepare_data mimic_cxr $(D)/mimic-cxr-jpg $(D)/mimic-ext-cxr-qba $(D)/prepared --image_size 64
	processes=$(PROCESSES) && \
	PATH="$(CURDIR)/$(BIN):$$PATH" ./launch_distributed_training.sh --config configs/mimic_cxr_demo.yaml $(ENGINE) \
	    --num_gpus $$processes --batch_size $$((512 / processes))

demo-survival:
	$(BIN)/python -m tools.sample_data survival data/demo/survival
	processes=$(PROCESSES) && \
	$(BIN)/python train_survival_distributed.py --config configs/survival_demo.yaml --world_size $$processes

demo-cascade:
	rm -rf data/demo/cascade_cache
	$(BIN)/python -m tools.sample_data cascade data/demo/cascade
	processes=$(PROCESSES) && export PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 && \
	multi=$$([ $$processes = 1 ] || echo --multi_gpu) && \
	accelerate launch $$multi --num_processes=$$processes --num_machines=1 --mixed_precision=fp16 --dynamo_backend=no \
	    train_accelerate.py --config configs/cascade_demo.json

# first train the baseline: Algorithm Distillation without compression, on histories of a tabular learner
demo-compressed_ad: T := train.py --config configs/compressed_ad_demo.yaml
demo-compressed_ad: D := data/demo/compressed_ad
demo-compressed_ad: AD := runs/demo/compressed_ad/ad
demo-compressed_ad:
	$(BIN)/python -m tools.sample_data compressed_ad $(D)/tabular
	$(BIN)/python -m tools.sample_data compressed_ad $(D)/search --source search
	processes=$(PROCESSES) && \
	$(BIN)/python $(T) --world_size $$processes --data $(D)/tabular --model ad --objective ad --from_start 0.5 --output_dir $(AD) && \
	$(BIN)/python $(T) --world_size $$processes --rival_run $(AD)

demo-all: setup
	$(MAKE) demo TASK=prs_med
	$(MAKE) demo TASK=mimic_cxr
	$(MAKE) demo TASK=survival
	$(MAKE) demo TASK=cascade
	$(MAKE) demo TASK=compressed_ad

test: setup-dev
	$(BIN)/python -m pytest -q -n 2 --no-loadscope-reorder -m "not soak"

test-quick: setup-dev
	$(BIN)/python -m pytest -q -n 2 -m "not soak" tests/test_[!p]*.py -k "not hardware and not rehearse and not benchmark"
	$(BIN)/python -m pytest -q tests/test_promise.py -k "minimal and (three or killed)" -m "not soak"

soak: setup-dev
	$(BIN)/python -m pytest -q -s -m soak

gpu: $(if $(GIVEN),,setup)
	$(if $(GIVEN),$(PYTHON),$(BIN)/python) benchmarks/gpu.py $(FLAGS)

# omit -r lines and the pins that WITH replaces
versions: V := .venv-versions
versions:
	rm -rf $(V) runs/versions
	$(PYTHON) -m venv $(V)
	cat requirements.txt requirements-dev.txt | \
	    grep -v -e '^-r' $(foreach pin,$(WITH),-e '^$(firstword $(subst =, ,$(pin)))==') >$(V)/pins.txt
	$(V)/bin/python -m pip install --quiet --disable-pip-version-check -r $(V)/pins.txt $(WITH)
	touch $(V)/requirements-dev.txt
	. $(V)/bin/activate && $(MAKE) VENV=$(V) test-quick
	$(V)/bin/python benchmarks/gpu.py --tiny --folder runs/versions $(FLAGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SHELL_FILES)
	$(BIN)/shfmt -d -i 2 -ci $(SHELL_FILES)
