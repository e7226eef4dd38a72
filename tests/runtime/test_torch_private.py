"""What pypipe uses of torch's private parts: all of it is listed, and the installed torch has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

import pypipe
from pypipe.runtime import torch_private

ROOT = Path(pypipe.__file__).parent
OF_NAMED_TUPLES = {"_replace", "_asdict"}
OWN = {"_open", "_exit"}  # os._exit, and a method of our own that is called by super()


def _modules() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(ROOT.rglob("*.py")):
        # pypipe.compat takes the place of torch's pipelining, with the private names that trainers read there.
        if path.name != "torch_private.py" and path.parent != ROOT / "compat":
            yield path, ast.parse(path.read_text())


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_other_module_imports_what_is_private() -> None:
    allowed = {"torch.distributed.fsdp._fully_shard._fsdp_common"}  # in a function, for releases before 2.13
    for path, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
                parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert str(node.module) in allowed or not any(map(_private, parts)), f"{path.name}: {ast.unparse(node)}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert not _private(node.attr), f"{path.name}: {ast.unparse(node)}"


def test_every_private_attribute_of_torch_s_objects_is_listed() -> None:
    used: set[str] = set()
    for path, tree in _modules():
        own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
        own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not _private(node.attr) or _is_self(node.value):
                continue
            if node.attr in own | OWN | OF_NAMED_TUPLES and node.attr not in torch_private.ATTRIBUTES:
                continue
            assert node.attr in torch_private.ATTRIBUTES, f"{path.name}: {ast.unparse(node)}"
            used.add(node.attr)
    assert used == torch_private.ATTRIBUTES.keys()


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_what_is_private_is_there_and_does_what_it_is_used_for() -> None:
    x = torch.ones(2, requires_grad=True)
    assert all(hasattr(torch.optim.SGD([x]), hooks) for hooks in torch_private.OPTIMIZER_HOOKS)
    before = torch_private.count_nodes_made()
    y = torch_private.unsafe_view(x, x.shape)
    assert torch_private.count_nodes_made() == before + 1
    assert not y._is_view()
    assert isinstance(y.grad_fn.next_functions[0][0], torch_private.AccumulateGrad)
    assert not isinstance(y.grad_fn, torch_private.FunctionBase)
    torch_private.engine.run_backward(
        (y,), (torch.ones(2),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert torch.equal(x.grad, torch.ones(2))  # type: ignore[arg-type]
    alone = torch.ones(2)
    uses, key = torch_private.storage_uses(alone), torch_private.storage_key(alone)
    other = alone.detach()
    assert torch_private.storage_uses(alone) > uses
    assert torch_private.storage_key(other) == key != torch_private.storage_key(y)
    assert not torch_private.are_modes_active()
    with torch.device("meta"):
        assert torch_private.are_modes_active()
    with torch_private.without_modes():
        pass
    assert not torch_private.is_any_autocast_enabled()
    assert torch_private.pytree.tree_leaves({"a": [1, 2]}) == [1, 2]
    assert torch_private.SavedTensor is not None
