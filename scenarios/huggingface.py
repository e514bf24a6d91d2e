"""A Hugging Face ``config.json`` as the fields of a model.

The vocabulary is taken as it stands (``vocab_multiple`` 1), so that counts are those of the checkpoint.
"""

from __future__ import annotations

from pathlib import PurePath

from ..topology.errors import InputError, Problem, nearest
from .architectures import MODEL_TYPES, READERS
from .config_json import Config, Fields

NEEDED = (
    "layers, hidden, heads, kv_heads, ffn, vocab, gated, tied, positions, norm, bias; "
    "with experts also experts, top_k and expert_ffn"
)


def is_config(document: Fields) -> bool:
    """Whether a document is such a file rather than a model of ours."""
    return "architectures" in document or "model_type" in document


def model_fields(document: Fields, where: str) -> Fields:
    """The fields of `Model` that a ``config.json`` stands for.

    Args:
        document: The file's content.
        where: Its name for errors.

    Raises:
        InputError: If the architecture is unknown, a key that shapes it is missing or of another kind, or it
            asks for a part that no model here has.

    >>> model_fields({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
    ...               "vocab_size": 50257}, "config.json")["hidden"]
    768
    """
    config = Config(document, architecture_of(document))
    reader = READERS.get(config.architecture)
    if reader is None:
        hint = nearest(config.architecture, READERS)
        message = f"{config.architecture[:60]!r} is not read{hint}. Write it as a model: {NEEDED}"
        raise InputError(where, [Problem("architectures", message)])
    fields = reader(config)
    if config.problems:
        raise InputError(where, config.problems)
    named = document.get("_name_or_path")
    name = named if isinstance(named, str) and named.strip() else PurePath(where).parent.name or config.architecture
    shared = {"name": name, "vocab_multiple": 1, "source": "its config.json"}
    return shared | {key: value for key, value in fields.items() if value is not None} | config.window()


def architecture_of(document: Fields) -> str:
    """The class that is built, by its name or by the model type."""
    names = document.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    kind = str(document.get("model_type"))
    return MODEL_TYPES.get(kind, kind)
