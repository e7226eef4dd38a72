"""The global names of a stage's parameters and buffers: what the whole model calls them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pypipe.runtime.rendezvous.state_names import without_wrappers

__all__ = ["GlobalNames", "Prefix"]

Prefix = str | Mapping[str, str]


def _join(first: str, second: str) -> str:
    return f"{first}.{second}" if first and second else first or second


class GlobalNames:
    """Translates a stage's local names, without those that wrappers add.

    Args:
        module: the stage's.
        prefix: a path that goes before every local name, or a mapping from local paths to global ones, of which the
            longest match wins. None: global names are local ones.

    Raises:
        ValueError: a key of the mapping matches nothing, or two names become one.
    """

    def __init__(self, module: nn.Module, prefix: Prefix | None) -> None:
        if prefix is not None and not isinstance(prefix, str | Mapping):
            raise ValueError(f"prefix={prefix!r}: it takes a string, or a mapping from local paths to global ones")
        mapping = {"": prefix} if isinstance(prefix, str) else dict(prefix or {})
        if not all(isinstance(part, str) for pair in mapping.items() for part in pair):
            raise ValueError(f"prefix={prefix!r}: a mapping takes local paths to global ones, both of them strings")
        self.is_given = prefix is not None
        self._mapping = {local.rstrip("."): path.rstrip(".") for local, path in mapping.items()}
        self._replicated = [name for name, part in module.named_modules() if isinstance(part, DistributedDataParallel)]
        if prefix is not None:
            self._require_one_to_one(module)

    def _require_one_to_one(self, module: nn.Module) -> None:
        names = [self.local_of(name) for name, _ in module.named_parameters(remove_duplicate=False)]
        names += [self.local_of(name) for name, _ in module.named_buffers(remove_duplicate=False)]
        # A module without parameters may be named as well: cuts by layer name all of them.
        known = {
            *names,
            *(self.local_of(f"{name}.").rstrip(".") for name, _ in module.named_modules(remove_duplicate=False)),
        }
        for key in self._mapping:
            if key and key not in known:
                raise ValueError(f"prefix has the key {key!r}, but the stage has no parameter, buffer or module of it")
        seen: dict[str, str] = {}
        for name in names:
            other = seen.setdefault(self.of(name), name)
            if other != name:
                raise ValueError(f"prefix gives {other!r} and {name!r} one global name, {self.of(name)!r}")

    def local_of(self, name: str) -> str:
        """A name that the module itself has, without what its wrappers add."""
        return without_wrappers(name, self._replicated)

    def of(self, local: str) -> str:
        """The global name of a local one."""
        path = local
        while True:
            if path in self._mapping:
                return _join(self._mapping[path], local[len(path) :].lstrip("."))
            if not path:
                return local
            path = path.rpartition(".")[0]
