"""Options of methods, as text and as values."""

from __future__ import annotations

import pytest

from longdraft.cli.options import SettingError, method_options, settings_checked
from longdraft.errors import ContextError


def test_values_have_their_kind():
    found = method_options(["a=1", "b=0.5", "c=text", "some-name=true", "d=x=y"])
    assert found == {"a": 1, "b": 0.5, "c": "text", "some_name": True, "d": "x=y"}


@pytest.mark.parametrize("text", ["a", "=1", ""])
def test_what_is_no_pair(text):
    with pytest.raises(SettingError, match="name=value"):
        method_options([text])


def test_bad_values_are_the_users_own_errors_pass():
    with pytest.raises(SettingError, match=r"too many\.$"), settings_checked():
        raise ValueError("too many")
    with pytest.raises(ContextError), settings_checked():
        raise ContextError("as it is")
