# make demo [TASK=prs_med]   set up, write sample data, train on every GPU or two CPU processes, print the test table
# make test                  set up, run the test suite          make soak   the long sweeps of faults and repeats
# make lint                  ruff, shellcheck, shfmt
PYTHON ?= python3
TASK ?= prs_med
BIN := .venv/bin
SHELL_FILES := run_multi_gpu_train.sh .ci/run

.PHONY: demo demo-all test soak lint setup setup-dev
setup: .venv/requirements.txt
setup-dev: .venv/requirements-dev.txt

.venv/%.txt: requirements.txt requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $*.txt
	cp $*.txt $@

demo: setup
	rm -rf data/demo/$(TASK) runs/demo/$(TASK)
	$(MAKE) --no-print-directory demo-$(TASK)

demo-prs_med:
	$(BIN)/python sample_data.py prs_med data/demo/prs_med
	processes=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)") && \
	PATH="$(CURDIR)/$(BIN):$$PATH" ./run_multi_gpu_train.sh data/demo/prs_med $$processes -- \
	    --config configs/prs_med_demo.yaml --batch_size $$((32 / processes))

demo-all: setup
	$(MAKE) demo TASK=prs_med

test: setup-dev
	$(BIN)/python -m pytest -q -m "not soak"

soak: setup-dev
	$(BIN)/python -m pytest -q -s -m soak

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SHELL_FILES)
	$(BIN)/shfmt -d -i 2 -ci $(SHELL_FILES)
