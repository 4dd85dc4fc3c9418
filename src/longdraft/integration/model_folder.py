"""A model folder whose ``generate`` decodes with longdraft: transformers runs its ``custom_generate/generate.py``.

Beside the target's own files it holds the draft. ``generate.py`` is three lines that call :func:`generating`; a program
that loads the folder with ``trust_remote_code=True``, such as ``transformers serve``, decodes with it as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

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
    arguments = [repr(method), *([f"draft={DRAFT!r}"] if draft is not None else [])]
    arguments += [f"{name}={value!r}" for name, value in (options or {}).items()]
    # PyTorch's own files of weights are taken along where there are no others.
    kept = _KEPT if check_folder(files) else (*_KEPT, "pytorch_model*.bin")
    linked = False
    try:
        (out / CODE).mkdir(parents=True, exist_ok=True)
        for file in files.iterdir() if out.resolve() != files.resolve() else ():
            if file.is_file() and any(fnmatch(file.name, pattern) for pattern in kept):
                linked |= _placed(file, out / file.name)
        if draft is not None and (out / DRAFT).resolve() != draft.resolve():
            shutil.copytree(draft, out / DRAFT, dirs_exist_ok=True)
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
        made = vars(model).setdefault("_longdraft_made", _Made())
        if folder not in made:
            drafts = {} if draft is None else {"draft": str(_draft(model, draft))}
            made[folder] = make(method, target=model, **drafts, **options)
        return plain(model, *inputs, **settings | {"custom_generate": made[folder]})

    return generate


def _draft(model: PreTrainedModel, place: str) -> Path:
    """Returns the draft's folder. It is beside ``generate.py``, but transformers runs a copy of that from elsewhere.

    Raises:
        CheckpointError: there is no such folder.
    """
    origin = str(model.name_or_path)
    folder = Path(origin).expanduser()
    draft = folder / place if folder.is_dir() else None
    if draft is None and origin:
        draft = fetched(origin, [f"{place}/*"], getattr(model.config, "_commit_hash", None)) / place
    if draft is None or not draft.is_dir():
        raise CheckpointError(
            f"There is no draft in {draft or place}: load the model from the folder that longdraft export wrote, or "
            "name the draft yourself, generate(custom_generate=Speculator(draft_folder))."
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
        folder = fetched(name, list(_KEPT))
    check_folder(folder)
    return folder


def fetched(name: str, patterns: list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with quiet():
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # a name, a network or a server may raise anything
        raise CheckpointError(
            f"{name!r} is not a folder here, and fetching it from the Hugging Face hub failed: {reason_of(error)}."
        ) from error


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
