"""Finds `state_dict` keys that stages have in common, which torch.distributed.checkpoint would take for one tensor.

It expects global names: if two stages each save a "0.weight", a checkpoint silently keeps only one of them.
Every rank's config has hashes of its stages' keys, so a rank finds that one of its keys is another stage's too.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pypipe.errors import NameClashWarning

__all__ = ["NameClash", "find_clash", "sketch", "without_wrappers"]

Rename = Callable[[str], str]

# Two stages with the same keys have the same smallest hashes, so a part of them will do. 48 bits each: among the stages
# of a large pipeline (2^14 hashes) two different keys have one hash in common once in a million pipelines.
_MOST, _BYTES, _CHARACTERS = 256, 6, 8

_CHECKPOINT = "torch.distributed.checkpoint"
_warned = False  # a process says it once, however many pipelines it builds


def _hash(key: str) -> str:
    return base64.b64encode(hashlib.sha256(key.encode()).digest()[:_BYTES]).decode()


# What torch.distributed.checkpoint.state_dict leaves out of a key: wrappers' names for what they wrap.
_OF_COMPILE, _OF_CHECKPOINT = "_orig_mod", "_checkpoint_wrapped_module"


def _keys(module: nn.Module, rename: Rename | None) -> Iterable[str]:
    """The module's keys, and what torch.distributed.checkpoint's own functions make of them; or their global names."""
    try:
        keys = list(module.state_dict(keep_vars=True))  # with the module's own hooks, which may rename
    except Exception:  # a module may be trained that cannot be saved
        return []
    replicated = [name for name, part in module.named_modules() if isinstance(part, DistributedDataParallel)]
    plain = [without_wrappers(key, replicated) for key in keys]
    return dict.fromkeys([*keys, *plain] if rename is None else map(rename, plain))


def without_wrappers(key: str, replicated: Iterable[str]) -> str:
    """A key without the names that wrappers add.

    Args:
        key: the key.
        replicated: the names of modules that are wrapped by DistributedDataParallel, whose content is their `module`.
    """
    for name in sorted(replicated, key=len, reverse=True):
        start = f"{name}." if name else ""
        if key.startswith(f"{start}module."):
            key = start + key.removeprefix(f"{start}module.")
    return ".".join(part for part in key.split(".") if part not in (_OF_COMPILE, _OF_CHECKPOINT))


def sketch(module: nn.Module, rename: Rename | None = None) -> str:
    """The smallest hashes of a stage's keys, in one string of at most 2 KiB.

    Args:
        module: the stage's.
        rename: makes a global name of a local one, where the stage has a prefix.
    """
    return "".join(sorted({_hash(key) for key in _keys(module, rename)})[:_MOST])


def _hashes(text: str) -> set[str]:
    return {text[start : start + _CHARACTERS] for start in range(0, len(text), _CHARACTERS)}


class NameClash:
    """A key of one of this rank's stages that another stage has as well.

    Args:
        key: the key.
        mine, other: the two stages.
    """

    def __init__(self, key: str, mine: int, other: int) -> None:
        self.text = (
            f"stages {min(mine, other)} and {max(mine, other)} both have {key!r} in their state_dict(), and "
            "torch.distributed.checkpoint keeps one tensor of a name: give each stage what the whole model calls it, "
            'PipelineStage(..., prefix="layers.3"), and save pypipe.checkpoint.get_state(), as pypipe\'s '
            "docs/checkpoints.md shows. To silence this: "
            'warnings.filterwarnings("ignore", category=pypipe.NameClashWarning)'
        )

    def warn(self, stacklevel: int) -> None:
        """Warns now where torch.distributed.checkpoint has been imported, else as soon as it is.

        A script that never imports it loses nothing by the clash, and reads no warning.

        Args:
            stacklevel: as for warnings.warn(), from the caller's point of view.
        """
        global _warned
        if _warned:
            return
        _warned = True
        if _CHECKPOINT in sys.modules:
            warnings.warn(self.text, NameClashWarning, stacklevel=stacklevel + 1)
        else:
            sys.meta_path.insert(0, _WarnAtImport(self.text))


class _WarnAtImport:
    """Finds no module, and warns when the first import of torch.distributed.checkpoint asks it to."""

    def __init__(self, text: str) -> None:
        self._text = text

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Called by the import system; the other finders do what is to be done."""
        if name == _CHECKPOINT:
            sys.meta_path.remove(self)
            warnings.warn(self._text, NameClashWarning, stacklevel=2)  # frames of the import system do not count


def find_clash(
    held: Sequence[tuple[int, nn.Module]], renames: Sequence[Rename | None], sketches: Iterable[tuple[int, str]]
) -> NameClash | None:
    """A clash of one of this rank's stages.

    Args:
        held: this rank's stages: which piece of the model each is, and its module.
        renames: for each of them, what makes global names, as for sketch().
        sketches: for every stage of all ranks, which piece it is, and its sketch. Two copies of a piece do not clash.
    """
    others = [(piece, _hashes(text)) for piece, text in sketches]
    for (mine, module), rename in zip(held, renames, strict=True):
        known = _hashes(sketch(module, rename))
        shared = {piece: known & hashes for piece, hashes in others if piece != mine and known & hashes}
        for piece, hashes in sorted(shared.items()):
            key = next((key for key in _keys(module, rename) if _hash(key) in hashes), None)
            if key is not None:
                return NameClash(key, mine, piece)
    return None
