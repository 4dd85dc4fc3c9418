"""Trains a draft in ten minutes: the model's own answers, a run, and what the draft is worth on texts it has not seen.

    python examples/train_a_draft.py report1.txt report2.txt ...           # texts like those you will ask about
    python examples/train_a_draft.py *.txt --model coder-1.5b.gguf --kind longspec --answers 2000

Each step is a command that you can give yourself; it prints them. All can be stopped and go on when given again.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen


@contextmanager
def serving(*model: object) -> Iterator[str]:
    """`longdraft serve`, which answers at the address until the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, url = ["longdraft", "serve", "--port", str(port), *map(str, model)], f"http://127.0.0.1:{port}"
    print(f"\n$ {' '.join(command)}", flush=True)
    server = subprocess.Popen([sys.executable, "-m", *command])
    try:
        while True:
            if server.poll() is not None:
                raise SystemExit(server.returncode)
            try:
                with urlopen(f"{url}/ready"):
                    break
            except URLError:
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait()


def longdraft(*words: object) -> None:
    """Runs a command of longdraft, and shows it."""
    command = ["longdraft", *map(str, words)]
    print(f"\n$ {' '.join(command)}", flush=True)
    if code := subprocess.run([sys.executable, "-m", *command], check=False).returncode:
        raise SystemExit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", help="texts in UTF-8; the last one is kept for the test")
    parser.add_argument("--model", help="a hub id, a folder or a .gguf file; the embedded model if left out")
    parser.add_argument("--kind", default="eagle3", help="longspec, eagle3, tokenswift, lm (eagle3)")
    parser.add_argument("--answers", type=int, default=240, help="answers that it learns from (240)")
    parser.add_argument("--epochs", type=float, default=1.0, help="how often it reads them (1)")
    parser.add_argument("--out", type=Path, default=Path("my-draft"), help="folder of all that is made (my-draft)")
    args = parser.parse_args()
    if len(args.texts) < 2:
        parser.error("give two texts or more: the last one is kept for the test")
    args.out.mkdir(parents=True, exist_ok=True)
    *learned, held_out = args.texts
    for name, files in {"texts": learned, "held-out": [held_out]}.items():
        rows = [json.dumps({"text": file.read_text(encoding="utf-8")}) + "\n" for file in files]
        (args.out / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    data, run = args.out / "answers.jsonl", args.out / args.kind
    model = ["--model", args.model] if args.model else []
    with serving(*model) as url:
        longdraft("train", "data", args.out / "texts.jsonl", "--url", url, "--out", data, "--rows", args.answers)
    settings = [f"target={args.model}"] if args.model else []
    longdraft("train", args.kind, f"data={data}", f"out={run}", f"epochs={args.epochs:g}", *settings)
    # Always a chain of three, and as much as pays on this machine, which may be nothing.
    draft = f"{'small-lm' if args.kind == 'lm' else args.kind}:draft={run / 'best'}"
    methods = f"ar,{draft}:tree=chain:depth=3:plan=fixed,{draft}"
    test = ["--data", args.out / "held-out.jsonl", "--context", 1000, "--max-tokens", 64]
    longdraft("bench", *test, "--methods", methods, *model)


if __name__ == "__main__":
    main()
