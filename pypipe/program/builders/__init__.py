"""Builders: functions that make the programs of known schedules. Each module here is found by itself."""

import importlib
import pkgutil

# The order in which schedules are listed, the basic ones first; modules that it leaves out follow in alphabetical
# order.
_FIRST = ("linear", "looped", "zero_bubble", "v_shaped", "controllable_memory", "bidirectional")

_found = sorted(module.name for module in pkgutil.iter_modules(__path__))
for _name in sorted(_found, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)):
    importlib.import_module(f"{__name__}.{_name}")
