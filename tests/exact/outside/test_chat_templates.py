"""Chat templates are programs of strangers: rendered as by transformers, within bounds of time and memory."""

from __future__ import annotations

import os
import threading
from typing import Any

import psutil
import pytest

from longdraft import LongdraftError
from longdraft.engine.chat import apply_chat_template, encode_conversation
from longdraft.engine.rendering import TemplateRenderer
from longdraft.errors import PromptError
from tests.support.tiny import tiny_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  be brief <&> "},
    {"role": "user", "content": "caf\u00e9 \u4f60"},
    {
        "role": "assistant",
        "content": "yes",
        "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": "x"}}}],
    },
    {"role": "user", "content": "so?\n"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def with_template(template: str) -> Any:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template, tokenizer.name_or_path = template, "/models/of/a/stranger.gguf"
    return tokenizer


PLAIN = [
    "{% for m in messages %}<{{ m['role'] }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{%- for m in messages %}\n  {% if loop.first %}\n    {{- m['content'] }}\n  {% continue %}\n  {% endif %}\n"
    "{{ m | tojson }}\n{%- endfor %}",
    "{{ tools | tojson(indent=2) }}{{ messages | tojson(true) }}{{ messages[2].tool_calls | tojson(False, 4) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% generation %}{{ ns.n }}"
    "{% endgeneration %}{% endfor %}{{ dict(a=1) }}{{ documents }}{{ tools is none }}{{ thinking }}{{ missing }}",
    "{% macro f(x) %}[{{ x | upper }}]{% endmacro %}{{ f(messages[0].role) }}{{ strftime_now('%Y') }}"
    "{% for k, v in messages[2].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% break %}{% endfor %}",
]


@pytest.mark.parametrize("template", PLAIN)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_text_is_that_of_transformers(template, tools):
    tokenizer = with_template(template)
    for prompt in (True, False):
        rendered = apply_chat_template(tokenizer, MESSAGES, tools=tools, add_generation_prompt=prompt, thinking="on")
        assert rendered == tokenizer.apply_chat_template(
            MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False, thinking="on"
        )


def test_named_templates():
    tokenizer = with_template("")
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools", "third": "3"}
    assert [apply_chat_template(tokenizer, MESSAGES, tools=tools) for tools in (None, TOOLS)] == ["plain", "tools"]
    assert apply_chat_template(tokenizer, MESSAGES, chat_template="third") == "3"


QUICK = [
    "{{ 'x' * 10**9 }}",
    "{{ 'x' | center(10**9) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '\\t'.expandtabs(10**9) }}",
    "{{ ('x' * 10**5).replace('x', 'y' * 10**5) }}",
    "{{ 'x' | indent(10**10, true) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{{ '\ud800' }}",
    "{{ raise_exception('\ud800') }}",
    "{{ ''.__class__.__mro__ }}{{ raise_exception.__globals__ }}",
    "{% for %}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ 1 / 0 }}",
    "{{ range(10**9) | list }}",
]
ENDLESS = [
    "{{ 7 ** (10 ** 9) }}",
    "{{ messages | length ** (10 ** 9) % 7 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ lipsum(10**6) }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
]


def refused(template: str) -> None:
    before = threading.active_count()
    with pytest.raises(PromptError) as error:
        encode_conversation(with_template(template), MESSAGES)
    assert isinstance(error.value, LongdraftError) and "/models/of/a/stranger.gguf" in str(error.value)
    assert str(error.value).encode() and threading.active_count() <= before + 1


@pytest.mark.parametrize("template", QUICK, ids=range(len(QUICK)))
def test_a_template_that_asks_for_too_much_is_refused_by_name(template):
    refused(template)


@pytest.mark.parametrize("number", [2, *(pytest.param(i, marks=pytest.mark.slow) for i in (0, 1, 3, 4))])
def test_a_template_without_end_is_ended(number):
    renderer = TemplateRenderer(max_cpu_seconds=0)
    with pytest.raises(PromptError):
        renderer(ENDLESS[number], {"messages": MESSAGES})
    assert renderer("{{ messages | length }}", {"messages": MESSAGES}) == "4"
    renderer.close()


def test_the_process_serves_all_threads_and_is_replaced_when_it_ends():
    tokenizer, found = with_template(PLAIN[0]), []

    def render(number: int) -> None:
        for turn in range(20):
            text = f"{number}, {turn}"
            found.append(text in apply_chat_template(tokenizer, [{"role": "user", "content": text}]))

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
    for child in psutil.Process().children():
        if "rendering" in " ".join(child.cmdline()):
            child.kill()
            child.wait()
            break
    else:
        pytest.fail("templates were rendered in this process")
    assert "so?" in apply_chat_template(tokenizer, MESSAGES)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_its_own():
    tokenizer = with_template(PLAIN[0])
    text = apply_chat_template(tokenizer, MESSAGES)
    child = os.fork()
    if not child:
        os._exit(0 if apply_chat_template(tokenizer, MESSAGES) == text else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert apply_chat_template(tokenizer, MESSAGES) == text
