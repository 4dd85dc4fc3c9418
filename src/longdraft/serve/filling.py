"""Fill in the middle: a completion between a prompt and a suffix, with the tokens that models of code know for it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from longdraft.errors import CapabilityError
from longdraft.model.chat import encode

# Tokens before the prompt, before the suffix, and before the model's answer: Qwen-Coder's and CodeGemma's form, and
# StarCoder's.
_FORMS = (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
# These end an answer too, besides the known ends: another file would begin.
_ENDS = ("<|file_separator|>", "<file_sep>")


def filling_prompt(tokenizer: PreTrainedTokenizerBase, text: str, suffix: str) -> list[int]:
    """Token ids that ask for what stands between a text and a suffix.

    Raises:
        CapabilityError: the model has no tokens for that. PromptError: the text is not valid Unicode.
    """
    before, between, answer = _form(tokenizer)
    return encode(tokenizer, f"{before}{text}{between}{suffix}{answer}")


def filling_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end such an answer, besides the model's own."""
    known = tokenizer.get_vocab()
    return [known[token] for token in (*_form(tokenizer), *_ENDS) if token in known]


def _form(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    known = tokenizer.get_vocab()
    for form in _FORMS:
        if all(token in known for token in form):
            return form
    raise CapabilityError(
        "This model has no tokens for text in the middle (such as <|fim_prefix|>), so suffix cannot be served: leave "
        "it out, or serve a model of code that was trained for it, such as Qwen2.5-Coder."
    )
