"""What CONTRIBUTING.md asks of every source, held by a test.

How the C++ is read: comments, strings and preprocessor lines are blanked, then braces are
counted. A block whose head has an argument list, outside any other function, is a function;
lambdas and local classes count as part of the function around them. Limits: what a macro writes
is not seen (a use such as NB_MODULE(...) { } is), `#if` branches that do not balance their
braces mislead it, and a head is searched no further back than the last `;`, `{` or `}`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hostcache"

FUNCTION_LINES = 60
MODULE_LINES = {".py": 400, ".pyi": 400, ".cpp": 600, ".h": 600}

# Each module imports only from those before it; "hostcache" is the public surface, __init__.py.
ORDER = (
    *("errors", "config", "fingerprint", "keys", "keylists", "_core", "tensors", "pages"),
    *("stats", "kv", "embeds", "segments", "check", "tiers", "hostcache"),
    *("adapters", "demo_text", "demo_model", "demo_child", "demo"),
    *("cli", "replay", "testing", "__main__"),
)

# Loading what these wrote runs code of whoever wrote it.
UNSAFE_IMPORTS = {"pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
# Other kinds of shared memory: System V segments have neither a folder nor modes of ours, and the
# resource tracker of multiprocessing.shared_memory removes what others still use.
FORBIDDEN_TEXT = {"src": ("multiprocessing.shared_memory", "shmget"), "core": ("shmget",)}

# What is let off, by "path" or "path::function". This list may only get shorter: an entry that
# is no longer needed fails `test_exceptions_are_still_needed`.
EXCEPTIONS: frozenset[str] = frozenset()


class Function(NamedTuple):
    """A function and where it is."""

    name: str  # path::name
    lines: int


def files(*suffixes: str, folders: tuple[str, ...]) -> list[Path]:
    found = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in suffixes]
    return sorted(p for p in found if "__pycache__" not in p.parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------- reading


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def python_functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield Function(f"{relative(path)}::{node.name}", node.end_lineno - node.lineno + 1)


BLANKED = re.compile(
    r"""//[^\n]* | /\*.*?\*/                            # comments
    | R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"                # raw strings
    | "(?:\\.|[^"\\\n])*" | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'  # strings, characters; not 1'000
    | ^[ \t]*\#(?:\\\n|[^\n])*                          # preprocessor lines""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def blanked(text: str) -> str:
    """The same text, line for line, without what could hold a stray brace."""
    return BLANKED.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def block_end(text: str, start: int) -> int:
    """Position after the brace that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)


def function_end(text: str, start: int) -> int:
    """The end of a function whose first block begins at `start`, which may be `: member{...}`."""
    end = block_end(text, start)
    while following := re.compile(r"\s*(?:,[^;{}]*)?\{").match(text, end):
        end = block_end(text, following.end() - 1)
    return end


def name_in(head: str) -> str | None:
    """The function's name where a block's head is a function's, else None."""
    if re.search(r"\b(?:class|struct|union|enum|namespace)\b[^()]*$", head):
        return None
    named = re.search(r"(~?[\w:~]+|operator\s*[^\s\w(]+|operator\s*\(\s*\))\s*\(", head)
    if named is None or re.search(r"(?<![=!<>])=(?!=)", re.sub(r"operator\s*\S+|\(.*", "", head)):
        return None
    return re.sub(r"\s+", "", named.group(1))


def cpp_functions(path: Path) -> Iterator[Function]:
    text = blanked(path.read_text(encoding="utf-8"))
    head_at, parens, at = 0, 0, 0
    while at < len(text):
        char = text[at]
        parens += {"(": 1, ")": -1}.get(char, 0)
        if char in "{};" and parens == 0:
            head = text[head_at:at]
            name = name_in(head) if char == "{" else None
            if name is not None:
                end = function_end(text, at)
                begun = head_at + len(head) - len(head.lstrip())
                yield Function(f"{relative(path)}::{name}", text.count("\n", begun, end) + 1)
                at = end - 1
            head_at = at + 1
        at += 1


def functions() -> Iterator[Function]:
    for path in files(".py", folders=("src", "tools", "benchmarks")):
        yield from python_functions(path)
    for path in files(".cpp", ".h", folders=("core",)):
        yield from cpp_functions(path)


def imports(path: Path) -> Iterator[str]:
    """Full names of what a module imports, wherever in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name: str) -> str:
    """hostcache.tiers.disk.Disk -> tiers; hostcache.KvCache -> hostcache."""
    first = [*name.split("."), ""][1]
    return first if first in ORDER else "hostcache"


# ---------------------------------------------------------------- rules


def too_long() -> dict[str, int]:
    long = {f.name: f.lines for f in functions() if f.lines > FUNCTION_LINES}
    for path in files(*MODULE_LINES, folders=("src", "core", "tools")):
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MODULE_LINES[path.suffix]:
            long[relative(path)] = lines
    return long


def test_functions_and_modules_fit_in_a_head() -> None:
    assert {name: n for name, n in too_long().items() if name not in EXCEPTIONS} == {}


def test_exceptions_are_still_needed() -> None:
    assert EXCEPTIONS - too_long().keys() == frozenset()


def test_sources_are_ascii() -> None:
    suffixes = (*MODULE_LINES, ".txt", ".toml")
    folders = ("src", "core", "tests", "tools", "benchmarks", "requirements")
    named = [ROOT / n for n in ("Makefile", "CMakeLists.txt", "pyproject.toml", ".ci/run")]
    read = [*files(*suffixes, folders=folders), *(p for p in named if p.exists())]
    assert [relative(p) for p in read if not p.read_bytes().isascii()] == []


def test_nothing_is_loaded_that_could_run_code() -> None:
    loaded = {
        relative(path): name
        for path in files(".py", folders=("src", "tools", "benchmarks"))
        for name in imports(path)
        if name.split(".")[0] in UNSAFE_IMPORTS
    }
    assert loaded == {}


def test_shared_memory_is_ours_alone() -> None:
    used = [
        (relative(path), text)
        for folder, texts in FORBIDDEN_TEXT.items()
        for path in files(*MODULE_LINES, folders=(folder,))
        for text in texts
        if text in path.read_text(encoding="utf-8")
    ]
    assert used == []


def test_modules_import_only_from_those_above_them() -> None:
    for path in files(".py", folders=("src",)):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0].replace("__init__", "hostcache")
        assert own in ORDER, f"{relative(path)}: give it its place in ORDER"
        for name in imports(path):
            if name.split(".")[0] != "hostcache" or layer(name) == own:
                continue
            lower = ORDER.index(layer(name)) < ORDER.index(own)
            assert lower, f"{relative(path)} imports {name}, which stands below it"


def test_import_loads_no_engine() -> None:
    code = "import sys, hostcache; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert child.returncode == 0, child.stderr
    loaded = set(child.stdout.split())
    assert "numpy" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "vllm", "sglang", "lightllm"})


# ---------------------------------------------------------------- the reader itself

CPP = """\
#define BRACE {
namespace a {
enum class E { x, y };
struct S : public B {
  S(int a, const char *b = "{")
      : a_{a}, b_{1} {
    run();
  }
  bool operator==(const S &other) const { return true; }
  int limit = 1'000;  // {
  int after = '{';
};
constexpr int table[] = {f(1),
                         2};
template <class T>
auto call(T t, int n = {}) -> int {
  auto inner = [](int x) {
    return x;
  };
  if (n) {
    return 1;
  }
  return inner(R"(})");
}
}  // namespace a
"""


def test_the_reader_finds_functions_and_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "x.cpp").write_text(CPP)
    found = {f.name.removeprefix("x.cpp::"): f.lines for f in cpp_functions(tmp_path / "x.cpp")}
    assert found == {"S": 4, "operator==": 1, "call": 10}
