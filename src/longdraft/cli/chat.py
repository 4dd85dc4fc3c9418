"""``longdraft chat``: a conversation in the terminal, with or without documents."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import typer

import longdraft
from longdraft.cli import console, method_options, options, prompt_input
from longdraft.cli.cancel import Cancel
from longdraft.cli.display import TextOutput, display_run
from longdraft.engine.chat import encode_conversation
from longdraft.errors import ContextError, LongdraftError, RequestError
from longdraft.options import suggestion


def chat(
    *,
    file: Annotated[
        list[str] | None, typer.Option("--file", "-f", help="Document to talk about, a text file or PDF; repeatable.")
    ] = None,
    method: options.Method = None,
    option: options.MethodOptionPairs = None,
    template_options: options.TemplateOptions,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Maximum number of new tokens.")] = 512,
    sampling_options: options.SamplingOptions,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed samples the same text.")] = None,
    decoding: method_options.DecodingOptions,
    debug: options.Debug = False,
) -> None:
    """Talk with the model, with or without documents. /help lists the commands of a conversation."""
    method, method_args = decoding.resolve(method, option)
    decoding.model_options.preload()
    with options.settings_checked():
        seed = random.randrange(2**32) if seed is None else seed
        settings = ChatSettings(sampling_options.sampling(), max_tokens, seed)
        method_args = longdraft.Speculator(method, **decoding.speculator_kwargs, **method_args).options
    documents = [prompt_input.read_document(name) for name in file or []]
    with console.status() as status:
        loaded = decoding.model_options.load(status)

        def make_speculator(name: str | None, method_args: dict[str, Any]) -> longdraft.Speculator:
            kwargs = {**decoding.speculator_kwargs, **method_args}
            return longdraft.Speculator(name, loaded.model, loaded.tokenizer, **kwargs)

        with options.settings_checked():
            spec = make_speculator(method, method_args)
            spec.planner(status)  # measures the cost of verifications before the first question
    conversation = Chat(loaded, spec, make_speculator, settings, template_options, documents)
    console.note(f"{decoding.model_name}, decoded with {spec.method.name}. /help lists the commands, Ctrl-D ends.")
    conversation.run()


@dataclass(frozen=True)
class ChatSettings:
    """The settings of answers, which the command /set changes."""

    sampling: longdraft.Sampling
    max_tokens: int
    seed: int

    def with_value(self, name: str, text: str) -> ChatSettings:
        """Returns a copy with one setting changed. Raises RequestError for an unknown name or a bad value."""
        is_int = name in ("max_tokens", "seed")
        sampling_names = [f.name for f in fields(longdraft.Sampling)]
        if not is_int and name not in sampling_names:
            raise RequestError(f"/set takes max_tokens, seed, {', '.join(sampling_names)}, not {name!r}")
        values = (method_options.parse_ints if is_int else method_options.parse_floats)(name, text)
        if len(values) != 1:
            raise RequestError(f"/set {name} takes one number, not {text!r}")
        (value,) = values
        # top_k and repetition_window must be integers, so 20.0 becomes 20.
        change: dict[str, Any] = {name: int(value) if float(value).is_integer() else value}
        return replace(self, **change) if is_int else replace(self, sampling=replace(self.sampling, **change))


class Chat:
    """A conversation with a model, with its /commands.

    Args:
        make_speculator: makes a speculator from a method's name (None: the default method) and options.
        template_options: the system message, and whether the model thinks.
        documents: texts to put before the first question.
    """

    def __init__(
        self, loaded: longdraft.LoadedModel, spec: longdraft.Speculator,
        make_speculator: Callable[[str | None, dict[str, Any]], longdraft.Speculator], settings: ChatSettings,
        template_options: options.TemplateOptions, documents: list[str] | None = None,
    ) -> None:  # fmt: skip
        self._loaded, self._spec, self._make_speculator, self._settings = loaded, spec, make_speculator, settings
        self._system, self._documents = template_options.system, list(documents or [])
        self._template_kwargs = template_options.template_kwargs
        self._messages: list[dict[str, str]] = []
        # Kept for the whole conversation; /method replaces it if the new method reads further layers of the target.
        self._cache = longdraft.PromptCache(spec.feature_layers())
        # /help -> _command_help, and so on.
        self._commands: dict[str, Callable[[str], None]] = {
            name.removeprefix("_command_"): getattr(self, name) for name in dir(self) if name.startswith("_command_")
        }

    def run(self) -> None:
        """Reads lines and answers them until the input ends."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (arrow keys and history in input())
        leaving = False  # True if the last input was Ctrl-C
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
            except (EOFError, KeyboardInterrupt) as end:
                if is_terminal:
                    console.print_line("")
                if leaving or not is_terminal or isinstance(end, EOFError):
                    return
                leaving = True
                console.note("Press Ctrl-C again to end, or type exit or Ctrl-D.")
                continue
            leaving = False
            if line in ("exit", "quit"):
                return
            try:
                if line.startswith("/"):
                    if not self._run_command(line):
                        return
                elif line:
                    self.ask(line)
            except (LongdraftError, OSError) as error:
                if isinstance(error, OSError) and not line.startswith("/"):
                    raise  # stdout is closed: the answer cannot be shown
                console.error(str(error) if line.startswith("/") else console.with_flag_names(str(error)))

    def ask(self, text: str) -> longdraft.Result | None:
        """Asks a question and shows the answer as it comes. Returns None if Ctrl-C came before the first token."""
        messages = [*self._messages, {"role": "user", "content": "\n\n".join([*self._documents, text])}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        prompt = encode_conversation(self._loaded.tokenizer, [*system, *messages], **self._template_kwargs)
        settings = self._settings
        with Cancel() as cancel:
            try:
                run = self._spec.stream(
                    prompt, max_new_tokens=settings.max_tokens, sampling=settings.sampling,
                    seed=None if settings.sampling.greedy else settings.seed, cache=self._cache, cancelled=cancel,
                )  # fmt: skip
            except ContextError as error:
                raise ContextError(
                    f"{error} /new starts a new conversation; --rope-factor stretches the context."
                ) from None
            result = display_run(run, len(prompt), TextOutput())
        console.note(_describe(result))
        if not result.token_ids:
            return None
        self._documents = []
        self._messages = [*messages, {"role": "assistant", "content": result.text}]
        return result

    # --- commands: /help shows their docstrings ---

    def _run_command(self, line: str) -> bool:
        """Runs a line such as ``/set seed 1``. Returns False if the line ends the conversation."""
        name, _, rest = line[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        if name not in self._commands:
            advice = suggestion(name, [*self._commands, "quit"], "/") or "/help lists the commands."
            raise RequestError(f"There is no command /{name}: {advice}")
        self._commands[name](rest.strip())
        return True

    def _command_help(self, _: str) -> None:
        """show this list"""
        for name, command in sorted(self._commands.items()):
            console.print_line(f"/{name:<8} {(command.__doc__ or '').strip()}")
        console.print_line(f"/{'quit':<8} end (Ctrl-D too); Ctrl-C stops an answer")

    def _command_method(self, text: str) -> None:
        """NAME [option=value ...]: decode with another method; without NAME: show the method in use"""
        if text:
            name, *pairs = text.split()
            spec = self._make_speculator(name, method_options.parse_options(name, pairs))
            with console.status() as status:
                spec.planner(status)
            self._spec = spec
            if not set(spec.feature_layers()) <= set(self._cache.feature_layers):
                self._cache = longdraft.PromptCache(spec.feature_layers())
        recipe = self._spec.recipe()
        console.note(", ".join([recipe.method.name, *(f"{name}={value}" for name, value in recipe.options.items())]))

    def _command_file(self, text: str) -> None:
        """PATH: add a document before the next question"""
        self._documents.append(prompt_input.read_document(text))
        console.note(f"{text}: {len(self._documents[-1]):,} characters, added to your next question")

    def _command_new(self, _: str) -> None:
        """forget the conversation and its documents"""
        self._messages, self._documents = [], []

    def _command_undo(self, _: str) -> None:
        """forget the last question and its answer"""
        self._messages = self._messages[:-2]

    def _command_set(self, text: str) -> None:
        """NAME VALUE: set temperature, top_p, max_tokens, seed, ...; without NAME: show the settings"""
        if text:
            name, _, value = text.replace("=", " ").partition(" ")
            with options.settings_checked():
                self._settings = self._settings.with_value(name.replace("-", "_"), value.strip())
        values = {f.name: getattr(self._settings.sampling, f.name) for f in fields(longdraft.Sampling)}
        values |= {"max_tokens": self._settings.max_tokens, "seed": self._settings.seed}
        console.note(", ".join(f"{name} {value}" for name, value in values.items() if value is not None))


def _describe(result: longdraft.Result) -> str:
    """Returns the line below an answer: tokens, speed, mean accepted length, prompt tokens, and whether it was cut."""
    parts = [f"{result.new_tokens} tokens"]
    if result.rounds:
        parts += [f"{result.tokens_per_second:.1f} tokens/s", f"{result.mean_accepted_length:.2f} a forward"]
    parts.append(f"{result.prompt_tokens - result.cached_tokens:,} of {result.prompt_tokens:,} prompt tokens read")
    if result.finish_reason in ("length", "cancelled"):
        parts.append("stopped" if result.finish_reason == "cancelled" else "cut at max_tokens")
    return ", ".join(parts)
