"""``longdraft chat``: a conversation in the terminal, about documents if there are any."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Annotated, Any

import typer

import longdraft
from longdraft.cli import console, method_options, options, prompt_input
from longdraft.cli.cancel import Cancel
from longdraft.cli.display import TextOutput, display_run
from longdraft.errors import ContextError, LongdraftError, RequestError
from longdraft.model.chat import encode_conversation


def chat(
    *,
    file: Annotated[
        list[str] | None, typer.Option("--file", "-f", help="A document to talk about; repeat it for several.")
    ] = None,
    method: options.Method = None,
    option: options.MethodOptionPairs = None,
    wording: options.TemplateOptions,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="New tokens of an answer at most.")
    ] = 512,
    choosing: options.SamplingOptions,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed samples the same text.")] = None,
    hosting: method_options.DecodingOptions,
    debug: options.Debug = False,
) -> None:
    """Talk with the model, about documents if there are any. /help lists what else can be said."""
    own = hosting.resolve_options(method, option)
    hosting.model_options.preload()
    with options.settings_checked():
        settings = ChatSettings(choosing.sampling(), max_tokens, random.randrange(2**32) if seed is None else seed)
        own = longdraft.Speculator(method, **hosting.speculator_kwargs, **own).options
    documents = [prompt_input.read_document(name) for name in file or []]
    with console.status() as status:
        loaded = hosting.model_options.load(status)

        def decoder(name: str | None, chosen: dict[str, Any]) -> longdraft.Speculator:
            return longdraft.Speculator(name, loaded.model, loaded.tokenizer, **hosting.speculator_kwargs, **chosen)

        with options.settings_checked():
            spec = decoder(method, own)
            spec.planner(status)
    talk = Chat(loaded, spec, decoder, settings, wording, documents)
    console.note(
        f"{hosting.model_name}, decoded with {spec.method.name}. /help lists the commands, exit or Ctrl-D ends."
    )
    talk.run()


@dataclass(frozen=True)
class ChatSettings:
    """Settings that /set changes."""

    sampling: longdraft.Sampling
    max_tokens: int
    seed: int

    def with_value(self, name: str, text: str) -> ChatSettings:
        """Raises RequestError for a name or a value that there is not."""
        whole, known = name in ("max_tokens", "seed"), [f.name for f in fields(longdraft.Sampling)]
        if not whole and name not in known:
            raise RequestError(f"/set takes max_tokens, seed, {', '.join(known)}, not {name!r}")
        values = (method_options.parse_ints if whole else method_options.parse_floats)(name, text)
        if len(values) != 1:
            raise RequestError(f"/set {name} takes one number, not {text!r}")
        (value,) = values
        one: dict[str, Any] = {name: int(value) if float(value).is_integer() else value}
        return replace(self, **one) if whole else replace(self, sampling=replace(self.sampling, **one))


class Chat:
    """A conversation with a model, its commands included.

    Args:
        decoder: makes a speculator of a method's name and options.
        documents: go before the first question.
    """

    def __init__(
        self,
        loaded: longdraft.LoadedModel,
        spec: longdraft.Speculator,
        make_speculator: Callable[[str | None, dict[str, Any]], longdraft.Speculator],
        settings: ChatSettings,
        template_options: options.TemplateOptions,
        documents: list[str] | None = None,
    ) -> None:
        self._loaded, self._spec, self._decoder, self._settings = loaded, spec, make_speculator, settings
        self._system, self._documents = template_options.system, list(documents or [])
        self._template = template_options.template_kwargs
        self._messages: list[dict[str, str]] = []
        # Kept from turn to turn, and from method to method where these read the same layers.
        self._cache = longdraft.PromptCache(spec.feature_layers())
        self._commands: dict[str, Callable[[str], None]] = {
            name.removeprefix("_say_"): getattr(self, name) for name in dir(self) if name.startswith("_say_")
        }

    def run(self) -> None:
        """Until the input ends."""
        terminal = sys.stdin.isatty()
        if terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (arrow keys and history in input())
        leaving = False  # the last thing was Ctrl-C
        while True:
            try:
                line = input("> " if terminal else "").strip()
            except (EOFError, KeyboardInterrupt) as end:
                if terminal:
                    console.print_line("")
                if leaving or not terminal or isinstance(end, EOFError):
                    return
                leaving = True
                console.note("Ctrl-C once more ends; so do exit and Ctrl-D.")
                continue
            leaving = False
            if line in ("exit", "quit"):
                return
            try:
                if line.startswith("/"):
                    if self._command(line) is False:
                        return
                elif line:
                    self.ask(line)
            except (LongdraftError, OSError) as error:
                if isinstance(error, OSError) and not line.startswith("/"):
                    raise  # nobody takes the answer
                console.error(str(error) if line.startswith("/") else console.with_flag_names(str(error)))

    # --- questions ---

    def ask(self, text: str) -> longdraft.Result | None:
        """A question and its answer, shown as it comes; None where it was stopped before its first token."""

        asked = "\n\n".join([*self._documents, text])
        messages = [*self._messages, {"role": "user", "content": asked}]
        first = [{"role": "system", "content": self._system}] if self._system else []
        prompt = encode_conversation(self._loaded.tokenizer, [*first, *messages], **self._template)
        settings = self._settings
        with Cancel() as cancel:
            try:
                run = self._spec.stream(
                    prompt, max_new_tokens=settings.max_tokens, sampling=settings.sampling,
                    seed=None if settings.sampling.greedy else settings.seed, cache=self._cache, cancelled=cancel,
                )  # fmt: skip
            except ContextError as error:
                raise ContextError(
                    f"{error} /new begins another conversation; --rope-factor stretches the context."
                ) from None
            result = display_run(run, len(prompt), TextOutput())
        console.note(_figures(result))
        if not result.token_ids:
            return None
        self._documents = []
        self._messages = [*messages, {"role": "assistant", "content": result.text}]
        return result

    # --- commands: what stands in their docstrings is what /help says ---

    def _command(self, line: str) -> bool | None:
        name, _, rest = line[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        if name not in self._commands:
            near = get_close_matches(name, [*self._commands, "quit"], 1)
            meant = f"; did you mean /{near[0]}?" if near else ""
            raise RequestError(f"There is no /{name}{meant} /help lists what there is.")
        self._commands[name](rest.strip())
        return None

    def _say_help(self, _: str) -> None:
        """this list"""
        for name, command in sorted(self._commands.items()):
            console.print_line(f"/{name:<8} {(command.__doc__ or '').strip()}")
        console.print_line(f"/{'quit':<8} end (Ctrl-D too); Ctrl-C stops an answer")

    def _say_method(self, text: str) -> None:
        """NAME [option=value ...]: decode with another method from now on; alone: which one it is"""
        if text:
            name, *pairs = text.split()
            spec = self._decoder(name, method_options.method_options(name, pairs))
            with console.status() as status:
                spec.planner(status)
            self._spec = spec
            if not set(spec.feature_layers()) <= set(self._cache.feature_layers):
                self._cache = longdraft.PromptCache(spec.feature_layers())
        recipe = self._spec.recipe()
        console.note(", ".join([recipe.method.name, *(f"{name}={value}" for name, value in recipe.options.items())]))

    def _say_file(self, text: str) -> None:
        """PATH: a document, which goes before the next question"""
        self._documents.append(prompt_input.read_document(text))
        console.note(f"{text}: {len(self._documents[-1]):,} characters go before your next question")

    def _say_new(self, _: str) -> None:
        """forget the conversation and its documents"""
        self._messages, self._documents = [], []

    def _say_undo(self, _: str) -> None:
        """forget the last question and its answer"""
        self._messages = self._messages[:-2]

    def _say_set(self, text: str) -> None:
        """NAME VALUE: temperature, top_p, max_tokens, seed and their like; alone: what they are"""
        if text:
            name, _, value = text.replace("=", " ").partition(" ")
            with options.settings_checked():
                self._settings = self._settings.with_value(name.replace("-", "_"), value.strip())
        own = {f.name: getattr(self._settings.sampling, f.name) for f in fields(longdraft.Sampling)}
        own |= {"max_tokens": self._settings.max_tokens, "seed": self._settings.seed}
        shown = {name: value for name, value in own.items() if value is not None}
        console.note(", ".join(f"{name} {value}" for name, value in shown.items()))


def _figures(result: longdraft.Result) -> str:
    read = result.prompt_tokens - result.cached_tokens
    parts = [f"{result.new_tokens} tokens", f"{read:,} of {result.prompt_tokens:,} prompt tokens read"]
    if result.rounds:
        parts[1:1] = [f"{result.tokens_per_second:.1f} tokens/s", f"{result.mean_accepted_length:.2f} a forward"]
    if result.finish_reason in ("length", "cancelled"):
        parts.append("stopped" if result.finish_reason == "cancelled" else "cut at max_tokens")
    return ", ".join(parts)
