"""Every public name is exported, documented, typed, and used by at least one test."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import hostcache as hc

TESTS = Path(__file__).parent
PUBLIC = sorted(set(hc.__all__) - {"__version__"})
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(hc, name))]

# As they are documented: whoever changes one changes what users wrote.
SIGNATURES = {
    "caches": "root",
    "content_key": "data, namespace, settings",
    "prefix_keys": "token_ids, page_tokens, namespace",
    "remove": "name, root, force",
    "weights_fingerprint": "folder",
    "Namespace": "model, weights, dtype, layout, split, adapter, salt",
    "PageFormat": "page_bytes, page_tokens, fragments",
    "KvCache.open": "name, page_format, capacity, page_count, namespace, root, max_reserved, "
    "progress, group, tiers",
    "KvCache.create": "name, page_format, capacity, page_count, namespace, root, max_reserved, "
    "progress, group, tiers",
    "KvCache.attach": "name, root, namespace",
    "KvCache.match": "keys",
    "KvCache.lookup": "keys, parts, gaps",
    "KvCache.reserve": "keys, parts, linked, starts, epoch, after",
    "KvCache.claim": "token, part",
    "KvCache.wait": "keys, timeout_s",
    "KvCache.clear": "everything",
    "KvCache.stats": "",
    "KvCache.check": "",
    "KvCache.close": "",
    "Lease.view": "i",
    "Lease.token": "",
    "Lease.release": "",
    "Reservation.view": "i",
    "Reservation.commit": "n",
    "Reservation.abort": "",
    "Reservation.end": "",
    "Reservation.token": "",
    "Part.view": "i",
    "Part.commit": "",
    "Part.abort": "",
}
PROPERTIES = {
    "KvCache": {"name", "format", "page_count", "info", "epoch", "orphaned"},
    "Lease": {"pages", "missing", "below", "epoch"},
    "Reservation": {"keys", "pages", "present", "pending", "refused"},
    "Part": {"pages", "part"},
    "KeyList": {"array"},
}


def members(name: str) -> dict[str, object]:
    """Public methods and properties of a class, those of our own base classes too."""
    cls = getattr(hc, name)
    return {
        attribute: inspect.getattr_static(cls, attribute)
        for attribute in dir(cls)
        if not attribute.startswith("_")
        and any(
            attribute in vars(base) and base.__module__.startswith("hostcache")
            for base in cls.__mro__
        )
    }


def function(member: object) -> object:
    """The function in a class's namespace: of a method, class method or property."""
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", member)


@pytest.mark.portable
def test_the_list_of_public_names_is_whole() -> None:
    assert hc.__all__ == sorted(hc.__all__)
    assert all(hasattr(hc, name) for name in hc.__all__)
    unlisted = {
        name
        for name, value in vars(hc).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in hc.__all__
    }
    assert unlisted == set()


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_is_documented(name: str) -> None:
    value = getattr(hc, name)
    assert value.__module__.startswith("hostcache")
    assert inspect.getdoc(value)
    assert value.__doc__ is not None
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return
    fields = (
        {field.name for field in dataclasses.fields(value)}
        if dataclasses.is_dataclass(value)
        else set()
    )
    for attribute, member in members(name).items():
        if attribute in fields or not callable(function(member)):
            continue
        if attribute == "array":
            continue  # in the docstring of its class
        assert inspect.getdoc(function(member)), f"{name}.{attribute}"


def test_each_name_is_typed() -> None:
    assert resources.files("hostcache").joinpath("py.typed").is_file()
    for name in PUBLIC:
        value = getattr(hc, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            continue
        callables = {name: value} if not inspect.isclass(value) else members(name)
        for attribute, member in callables.items():
            plain = function(member)
            if not inspect.isfunction(plain):
                continue
            signature = inspect.signature(plain)
            assert signature.return_annotation is not signature.empty, f"{name}.{attribute}"
            for parameter in signature.parameters.values():
                if parameter.name not in ("self", "cls"):
                    assert parameter.annotation is not parameter.empty, f"{name}.{attribute}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_as_documented(name: str) -> None:
    value: object = hc
    for part in name.split("."):
        value = getattr(value, part)
    parameters = inspect.signature(value).parameters  # type: ignore[arg-type]
    assert ", ".join(p for p in parameters if p != "self") == SIGNATURES[name]


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_are_as_documented(name: str) -> None:
    found = {
        attribute for attribute, member in members(name).items() if isinstance(member, property)
    }
    assert found == PROPERTIES[name]


def names_used() -> set[str]:
    """Every attribute and keyword that some test names."""
    used = set()
    for path in TESTS.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg is not None:
                used.add(node.arg)
    return used


def test_each_name_is_used_by_a_test() -> None:
    used = names_used()
    unused = [name for name in PUBLIC if name not in used]
    for name in CLASSES:
        if not issubclass(getattr(hc, name), BaseException):
            unused += [f"{name}.{m}" for m in members(name) if m not in used]
    assert unused == []


@pytest.mark.portable
def test_errors_have_one_root_and_a_code_each() -> None:
    errors = [getattr(hc, name) for name in CLASSES if issubclass(getattr(hc, name), BaseException)]
    assert all(issubclass(error, hc.HostCacheError) for error in errors)
    codes = [error.code for error in errors]
    assert len(set(codes)) == len(codes) == 12
    assert issubclass(hc.BadValue, ValueError)
    assert not issubclass(hc.NotAllocated, ValueError)


def test_the_version_is_the_projects() -> None:
    project = (TESTS.parent / "pyproject.toml").read_text()
    assert re.findall(r'(?m)^version = "(.+)"$', project) == [hc.__version__]


def test_a_caller_that_keeps_to_the_types_passes_strict_checking(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\n"
        "import hostcache as hc\n"
        "def run(tokens: list[int], ns: hc.Namespace) -> int:\n"
        "    page_format = hc.PageFormat(page_bytes=4096, page_tokens=16)\n"
        "    keys = hc.prefix_keys(tokens, page_tokens=16, namespace=ns)\n"
        "    with hc.KvCache.open('chat', page_format, capacity='1MiB', namespace=ns) as cache:\n"
        "        with cache.lookup(keys) as lease, cache.reserve(lease.missing) as res:\n"
        "            for i in range(len(res)):\n"
        "                np.frombuffer(res.view(i), np.uint8)[:] = 0\n"
        "            first: bytes = lease.missing[0]\n"
        "            rest: hc.KeyList = lease.missing[1:]\n"
        "            part = cache.claim(b'', 0)\n"
        "            if part is not None:\n"
        "                part.commit()\n"
        "            return res.commit() + len(first) + len(rest) + cache.stats().free\n"
    )
    source = str(TESTS.parent / "src")
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(program)],
        env={**os.environ, "MYPYPATH": source},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
