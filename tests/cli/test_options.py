"""Options of methods, as text and as values."""

from __future__ import annotations

import pytest

from longdraft.cli.method_options import method_options
from longdraft.cli.options import SettingError, settings_checked
from longdraft.errors import ContextError


def test_values_have_their_kind():
    found = method_options("longspec", ["lookup=true", "threshold=0.5", "draft=x=y", "top-k=3", "widths=4,4"])
    assert found == {"lookup": True, "threshold": 0.5, "draft": "x=y", "top_k": 3, "widths": (4, 4)}
    assert method_options("prompt-lookup", ["branches=2", "max-n=3"]) == {"branches": 2, "max_n": 3}


@pytest.mark.parametrize("text", ["a", "=1", ""])
def test_what_is_no_pair(text):
    with pytest.raises(SettingError, match="name=value"):
        method_options("ar", [text])


@pytest.mark.parametrize("text", ["many", "1.5", "true", ""])
def test_a_value_of_another_kind(text):
    with pytest.raises(SettingError, match="branches"):
        method_options("prompt-lookup", [f"branches={text}"])


def test_bad_values_are_the_users_own_errors_pass():
    with pytest.raises(SettingError, match=r"too many\.$"), settings_checked():
        raise ValueError("too many")
    with pytest.raises(ContextError), settings_checked():
        raise ContextError("as it is")
