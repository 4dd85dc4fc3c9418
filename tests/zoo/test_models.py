"""Every causal language model of transformers is hosted, token for token, or refused with a reason."""

from __future__ import annotations

import pytest
import transformers

from tests.support.slow_marks import slow_except
from tests.zoo import table
from tests.zoo.judging import judge
from tests.zoo.tiny_models import MODEL_TYPES

REMEDY = "`python -m tests.zoo.table {}` writes docs/models.md anew: look at the difference before you commit it."


# One or two of each kind; the others are tried by `make test-slow`.
FAST = {
    "bloom", "deepseek_v3", "falcon_h1", "gemma2", "gemma3", "gpt2", "gpt_oss", "lfm2", "llama", "mamba", "mixtral",
    "olmo2", "phi3", "qwen3", "smollm3",
}  # fmt: skip


@pytest.mark.usefixtures("restored_registries")
@pytest.mark.parametrize("model_type", slow_except(MODEL_TYPES, FAST))
def test_the_model_writes_its_own_text_or_is_refused(model_type):
    if model_type in table.MISSING:
        pytest.skip(f"needs {table.MISSING[model_type]}")
    verdict = judge(model_type)
    if transformers.__version__ == table.table_version():  # others host more or fewer
        assert table.row(model_type, verdict) == table.rows().get(model_type), REMEDY.format(model_type)


def test_the_page_has_no_model_that_is_gone():
    if transformers.__version__ == table.table_version():
        assert sorted(table.rows()) == list(MODEL_TYPES), REMEDY.format("")
