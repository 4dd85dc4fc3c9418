"""A model folder whose ``generate`` decodes with longdraft: transformers runs its ``custom_generate/generate.py``.

Beside the target's own files it holds the draft. ``generate.py`` is three lines that call :func:`generating`; a program
that loads the folder with ``trust_remote_code=True``, such as ``transformers serve``, decodes with it as it is.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from longdraft.errors import CapabilityError, CheckpointError, reason_of
from longdraft.model.checkpoints import check_folder, quiet

CODE, DRAFT = "custom_generate", "draft"
# Files of a target's folder that a model and its tokenizer are read from; weights are linked, the rest is copied.
_KEPT = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py", "LICENSE*")
_WEIGHTS = (".safetensors", ".bin")
_GENERATE = """\
from longdraft import Speculator
from longdraft.integration.model_folder import generating

generate = generating(Speculator, {arguments})
"""


class _Made(dict[Any, Any]):
    """Speculators of a model, kept as its attribute and so freed with it. A copy of the model starts empty."""

    def __reduce__(self) -> tuple[type[_Made], tuple[()]]:
        return _Made, ()


def write(
    out: Path | str, target: str, method: str, draft: Path | None = None, options: Mapping[str, Any] | None = None
) -> list[str]:
    """Writes the folder. It may be the target's own folder, whose files are then left unchanged.

    Args:
        target: a folder in Hugging Face layout, or a hub id.
        method: name of the method that decodes.
        draft: folder of its draft.
        options: of the method, plain values.

    Returns:
        Notes for the user, a sentence each.

    Raises:
        CapabilityError: the target is one file.
        CheckpointError: the target has no model or cannot be fetched, the folder cannot be written, or is the draft's.
    """
    out, files = Path(out), _target(target)
    if draft is not None and out.resolve() == draft.resolve():
        raise CheckpointError(f"{out} is the draft itself: name another folder to write to.")
    linked = False
    arguments = [repr(method), *([f"draft={DRAFT!r}"] if draft is not None else [])]
    arguments += [f"{name}={value!r}" for name, value in (options or {}).items()]
    try:
        (out / CODE).mkdir(parents=True, exist_ok=True)
        if out.resolve() != files.resolve():
            for file in _model_files(files):
                linked |= _placed(file, out / file.name)
        if draft is not None and (out / DRAFT).resolve() != draft.resolve():
            (out / DRAFT).mkdir(exist_ok=True)
            for file in draft.iterdir():
                if file.is_file():
                    shutil.copyfile(file, out / DRAFT / file.name)
        (out / CODE / "generate.py").write_text(_GENERATE.format(arguments=", ".join(arguments)), encoding="utf-8")
        (out / CODE / "requirements.txt").write_text("longdraft\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"Could not write the model folder {out}: {error}") from error
    return [f"Its weights are links to {files.resolve()}: copy it with cp -rL to have them along."] if linked else []


def generating(make: Callable[..., Any], method: str, draft: str | None = None, **options: Any) -> Callable[..., Any]:
    """Returns the ``generate`` of such a folder, which transformers calls in place of a model's, with ``model`` added.

    Args:
        make: :class:`longdraft.Speculator`; called once a model.
        draft: name of the draft's folder in the model folder.
        options: of the method.
    """
    folder = object()  # stands for this folder among the speculators of a model

    def generate(*inputs: Any, model: PreTrainedModel, **settings: Any) -> Any:
        plain = type(model).generate
        if settings.get("custom_generate") is not None:  # another loop than the folder's
            return plain(model, *inputs, **settings)
        settings.pop("trust_remote_code", None)
        drafts = {} if draft is None else {"draft": str(_draft(model, draft, _named_folder()))}
        made = vars(model).setdefault("_longdraft_made", _Made())
        key = (folder, drafts.get("draft"))
        speculator = made.get(key)
        if speculator is None:
            made[key] = speculator = make(method, target=model, **drafts, **options)
        return plain(model, *inputs, **settings | {"custom_generate": speculator})

    return generate


def _named_folder() -> str | None:
    """The folder or hub id of ``generate(custom_generate="...")``, which transformers does not hand on."""
    caller = sys._getframe(2)
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    named = caller.f_locals.get("custom_generate") if caller.f_code is generate else None
    return named if isinstance(named, str) else None


def _draft(model: PreTrainedModel, place: str, named: str | None) -> Path:
    """Returns the draft's folder. It is beside ``generate.py``, but transformers runs a copy of that from elsewhere.

    Raises:
        CheckpointError: there is no such folder.
    """
    origin = named or str(model.name_or_path)
    folder = Path(origin).expanduser()
    draft = folder / place if folder.is_dir() else None
    if draft is None and origin:
        revision = None if named else getattr(model.config, "_commit_hash", None)
        draft = _fetched(origin, [f"{place}/*"], revision) / place
    if draft is None or not draft.is_dir():
        raise CheckpointError(
            f"There is no draft in {draft or place}: load the model from the folder that longdraft export wrote, or "
            "name that folder, generate(custom_generate=folder, trust_remote_code=True)."
        )
    return draft


def _target(name: str) -> Path:
    """Returns the folder of a target's files, fetched if need be."""
    folder = Path(name).expanduser()
    if folder.is_file():
        raise CapabilityError(
            f"{folder} is a file, and transformers' generate needs a folder: give the Hugging Face folder or id."
        )
    if not folder.is_dir():
        folder = _fetched(name, list(_KEPT))
    check_folder(folder)
    return folder


def _fetched(name: str, patterns: list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with quiet():
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # a name, a network or a server may raise anything
        raise CheckpointError(
            f"{name!r} is not a folder here, and fetching it from the Hugging Face hub failed: {reason_of(error)}."
        ) from error


def _model_files(folder: Path) -> list[Path]:
    kept = _KEPT if check_folder(folder) else (*_KEPT, "pytorch_model*.bin")
    return sorted(f for f in folder.iterdir() if f.is_file() and any(fnmatch(f.name, pattern) for pattern in kept))


def _placed(file: Path, at: Path) -> bool:
    """Links a file of weights, copies any other; returns whether it was linked."""
    at.unlink(missing_ok=True)
    if file.suffix in _WEIGHTS:
        try:
            at.symlink_to(file.resolve())
            return True
        except OSError:  # a file system without links
            pass
    shutil.copyfile(file, at)
    return False
