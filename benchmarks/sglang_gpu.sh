#!/bin/sh
# LONGSPEC inside SGLang, on a machine with a GPU: greedy texts with and without it, and the accepted length.
#
#   sh benchmarks/sglang_gpu.sh TARGET DRAFT          # folders: a model, and the LongSpec draft trained for it
#   sh benchmarks/sglang_gpu.sh TARGET DRAFT --context-length 32768     # more arguments go to both servers
#
# It needs a Python (PYTHON names another than python3) with sglang 0.5.23 and this checkout, installed for its entry
# point. PORT (30123) and TOKENS (128, a prompt) may be given. The exit code is 1 where a text differs.
# Trees change the order of sums: where the two largest logits are nearly equal, half precision may choose otherwise.
set -eu
cd "$(dirname "$0")/.."
TARGET=$1 DRAFT=$2
shift 2
PYTHON=${PYTHON:-python3} PORT=${PORT:-30123} TOKENS=${TOKENS:-128}
OUT=$(mktemp -d)
SERVER=
stop() { [ -z "$SERVER" ] || { kill "$SERVER" && wait "$SERVER" || true; } 2>/dev/null; SERVER=; }
trap 'stop; rm -rf "$OUT"' EXIT INT TERM

# Starts a server, writes the texts of eight prompts to $OUT/$1.json, and stops it.
texts() {
  name=$1
  shift
  "$PYTHON" -m sglang.launch_server --model-path "$TARGET" --port "$PORT" --page-size 1 --mem-fraction-static 0.7 \
    --attention-backend triton "$@" >"$OUT/$name.log" 2>&1 &
  SERVER=$!
  "$PYTHON" benchmarks/sglang_texts.py "$PORT" "$TOKENS" "$SERVER" "$OUT/$name.json" || {
    tail -30 "$OUT/$name.log"
    exit 1
  }
  stop
}

texts plain "$@"
texts longspec --speculative-algorithm LONGSPEC --speculative-draft-model-path "$DRAFT" "$@"
"$PYTHON" benchmarks/sglang_texts.py --compare "$OUT/plain.json" "$OUT/longspec.json"
