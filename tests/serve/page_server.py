"""A server for tests of the page, whose model gives the answer that the question names.

To look at the page by hand: ``python -m tests.serve.page_server``. The first word of a question's last line chooses
the answer: ``slow`` (an answer of about a minute), ``code`` (a code block, and markup that must stay text), ``think``
(a thought, a list, a link, fences), ``free`` (what the model itself says), ``refuse`` (400, too long), ``busy`` (429
first), ``broken`` (an error in the middle), ``gone`` (a connection that ends early), ``drain`` (503); anything else
gets PLAIN.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from longdraft import LongdraftError, Speculator
from longdraft.serve.choice import Choice
from longdraft.serve.errors import ApiError
from longdraft.serve.service import Service
from longdraft.serve.settings import ServerSettings
from longdraft.serve.worker import Draining, QueueFull
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.serve.conftest import Running

MODEL, TOKENIZER = byte_model(), byte_tokenizer()
METHODS = ("self", "ar", "prompt-lookup")
SPECS = {method: Speculator(method, MODEL, TOKENIZER, plan="fixed") for method in METHODS}
PLAIN = (
    "The document describes three ways to read a long text. The first is exact and slow. The second is fast but "
    "forgets. The third drafts with the second and verifies with the first.\n\nIn short: draft with little."
)
CODE = (
    "A function that does it:\n\n```python\ndef accept(tree, logits):\n    path = [0]\n    while path[-1] in tree:\n"
    "        path.append(tree[path[-1]])\n    return path\n```\n\nMarkup stays text: <b>bold</b> <img src=x "
    "onerror=\"console.error('run')\"> and that is all."
)
THOUGHT = (
    "<think>First *this*, then that.</think>\n\n## Steps\n\n1. Read **it**\n2. Write `it`\n\n"
    "[more](https://example.org)\n\n````\n```\ninner\n```\n````\n\nEnd."
)
SLOW = PLAIN * 4


class Led:
    """A logits processor that forces a text, and does what else the kind of question asks for."""

    def __init__(self, server: PageServer, kind: str, prompt: int, begun: str) -> None:
        self._server, self._kind, self._prompt = server, kind, prompt
        text = {"code": CODE, "think": THOUGHT, "slow": SLOW, "free": ""}.get(kind, PLAIN).removeprefix(begun)
        self._wanted = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id] if text else []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = input_ids.shape[1] - self._prompt
        if self._kind == "slow":
            time.sleep(0.08 if at else 0.5)
        if at == 20 and self._kind == "broken":
            raise LongdraftError("The engine failed.")
        if at == 20 and self._kind == "gone":
            self._server.hang_up()
        if at < len(self._wanted):
            scores[0, self._wanted[at]] += 1000
        return scores


class LedService(Service):
    server: PageServer

    def make_choices(self, prompt: list[int], body: Any, *rest: Any, **options: Any) -> list[Choice]:
        self.server.asked.append(body.model_dump(exclude_unset=True))
        messages = [message.for_template() for message in body.messages]
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        kind = messages[-1]["content"].split("\n")[-1].split(" ")[0]
        if kind == "refuse":
            raise ApiError(400, "The prompt has 9,000 tokens, and 8,192 fit.")
        if kind == "drain":
            raise Draining("The server is shutting down.")
        if kind == "busy" and len(self.server.asked) == 1:
            raise QueueFull(1, 1.0)
        time.sleep(1.2 if kind == "slow" else 0)
        choices = super().make_choices(prompt, body, *rest, **options)
        for choice in choices:
            choice.processor_factories = [
                lambda: Led(self.server, kind, len(prompt), begun),
                *choice.processor_factories,
            ]
        return choices


class PageServer(Running):
    """The server. ``asked``: bodies of the chats so far."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        settings = ServerSettings("canned-model", METHODS, slots=2, context=1200)
        service = LedService(settings, SPECS.__getitem__, TOKENIZER)
        service.server = self
        super().__init__(service)

    def hang_up(self) -> None:
        """Ends all connections."""
        for connection in list(self.server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)


if __name__ == "__main__":
    print(PageServer().url)
    threading.Event().wait()
