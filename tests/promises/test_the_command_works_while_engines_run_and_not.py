"""`hostcache ls | stat | check | clear | rm`, while engines run and when none does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hostcache as hc
from helpers import FORMAT, PAGE_COUNT, Child, keys_of, store
from hostcache import cli

Ended = subprocess.CompletedProcess[str]
Run = Callable[..., Ended]


def with_root(root: str, arguments: tuple[str, ...], root_first: bool) -> list[str]:
    where = ["--root", root]
    return [*where, *arguments] if root_first else [*arguments, *where]


@pytest.fixture
def run(root: str) -> Run:
    """Runs the command on the test's root, in a process of its own."""

    def command(*arguments: str, root_first: bool = True) -> Ended:
        line = [sys.executable, "-m", "hostcache", *with_root(root, arguments, root_first)]
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)

    return command


@pytest.fixture
def run_here(root: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """The same in this process, which is quicker."""

    def command(*arguments: str, root_first: bool = True) -> Ended:
        line = with_root(root, arguments, root_first)
        try:
            status = cli.main(line)
        except SystemExit as ended:
            status = int(ended.code or 0)
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(line, status, shown.out, shown.err)

    return command


def output(ended: Ended) -> str:
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def failure(ended: Ended) -> str:
    """The one line on stderr of a command that could not do it."""
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("hostcache: ")
    return line


def namespace(salt: str) -> hc.Namespace:
    return hc.Namespace(
        model="tiny", weights="sha256:" + "0" * 64, dtype="float32", layout="test/1", salt=salt
    )


@pytest.fixture
def idle(root: str) -> str:
    """A cache in which no session lives, with four ready pages in each of two namespaces."""
    for salt in ("a", "b"):
        with hc.KvCache.open(
            "chat", FORMAT, page_count=PAGE_COUNT, root=root, namespace=namespace(salt)
        ) as cache:
            store(cache, keys_of(salt, 4))
    return "chat"


def test_ls_lists_caches(root: str, run: Run) -> None:
    assert output(run("ls")) == "no caches\n"
    hc.KvCache.open("b", hc.PageFormat("1MiB", 64), "4MiB", root=root).close()
    with hc.KvCache.open("a", FORMAT, page_count=8, root=root) as living:
        Path(root, "foreign").write_text("not ours")
        titles, *rows = (line.split() for line in output(run("ls", root_first=False)).splitlines())
        assert titles == ["NAME", "PAGES", "PAGE", "TOKENS", "MEMORY", "STATE"]
        assert rows[0][:5] == ["a", "8", "4", "KiB", "16"]
        assert rows[0][-2:] == ["in", "use"]
        assert rows[1][:5] == ["b", "4", "1", "MiB", "64"]
        assert rows[1][-1] == "idle"
        assert living.stats().sessions == 1
    lines = output(run("ls")).splitlines()
    columns = zip(lines, ("PAGE ", "4 KiB", "1 MiB"), strict=False)
    assert len({line.index(word) for line, word in columns}) == 1


@pytest.mark.parametrize("living", [True, False])
def test_stat_shows_the_same_with_and_without_engines(
    root: str, run: Run, idle: str, start_child: Callable[[], Child], living: bool
) -> None:
    if living:
        child = start_child()
        child.run("lease = cache.lookup(keys_of('a', 3))")
        child.run("mine = cache.reserve(keys_of('c', 2), after=bytes(keys_of('b', 4)[3]))")
    shown = json.loads(output(run("stat", idle, "--json")))
    assert (shown["page_count"], shown["ready"], shown["commits"]) == (PAGE_COUNT, 8, 8)
    assert (shown["name"], shown["page_bytes"], shown["page_tokens"]) == ("chat", 4096, 16)
    assert shown["size_bytes"] == os.stat(os.path.join(root, "chat")).st_size
    assert shown["living"] is living
    assert shown["sessions"] == len(shown["session_list"]) == int(living)
    pages = {one["digest"]: one["pages"] for one in shown["namespaces"]}
    assert pages[namespace("a").digest.hex()] == pages[namespace("b").digest.hex()] == 4
    labels = {one["label"] for one in shown["namespaces"]}
    assert {namespace("a").label, namespace("b").label} <= labels
    text = output(run("stat", idle))
    assert "chat" in text
    assert namespace("a").label in text
    if not living:
        with hc.KvCache.attach("chat", root=root) as cache:
            stats = {key: shown[key] for key in hc.Stats.__dataclass_fields__ if key != "sessions"}
            now = cache.stats()
            assert stats == {key: getattr(now, key) for key in stats}
        return
    (session,) = shown["session_list"]
    assert (session["pid"], session["alive"], session["holds"]) == (child.process.pid, True, 2)
    assert session["reserved_pages"] == 2
    assert session["age_s"] >= session["oldest_hold_s"] >= 0
    assert (shown["pinned"], shown["reserved"], shown["free"]) == (7, 2, PAGE_COUNT - 10)
    assert str(child.process.pid) in text
    assert child.run("result = cache.stats().sessions") == 1


@pytest.mark.portable
@pytest.mark.parametrize("living", [True, False])
def test_check_says_what_is_wrong(root: str, run: Run, idle: str, living: bool) -> None:
    session = hc.KvCache.attach(idle, root=root) if living else None
    assert output(run("check", idle)) == "chat: clean\n"
    assert output(run("check", idle, root_first=False)) == "chat: clean\n"
    if session is not None:
        session.close()


def test_check_finds_damage(root: str, run_here: Run, idle: str) -> None:
    path = Path(root, idle)
    whole = path.read_bytes()
    with hc.KvCache.attach(idle, root=root) as cache:
        table = cache.info["table_bytes"]
    key = bytes(keys_of("a", 1)[0])
    place = whole.index(key)
    assert place < table
    path.write_bytes(whole[:place] + bytes(32) + whole[place + 32 :])
    ended = run_here("check", idle)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout
    assert "clean" not in ended.stdout
    os.truncate(path, len(whole) // 2)
    ended = run_here("check", idle)
    assert ended.returncode == 1
    assert str(len(whole) // 2) in ended.stdout
    assert str(len(whole)) in ended.stdout
    assert output(run_here("ls")).count("chat")


def test_looking_changes_nothing(root: str, run_here: Run, idle: str) -> None:
    path = Path(root, idle)
    before, modified = path.read_bytes(), path.stat().st_mtime_ns
    names = os.listdir(root)
    for command in (("ls",), ("stat", idle), ("stat", idle, "--json"), ("check", idle)):
        output(run_here(*command))
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns == modified
    assert set(os.listdir(root)) - set(names) <= {f".{idle}.lock"}


@pytest.mark.portable
@pytest.mark.parametrize("living", [True, False])
def test_clear_forgets_what_is_named(root: str, run_here: Run, idle: str, living: bool) -> None:
    session = hc.KvCache.attach(idle, root=root) if living else None
    a, b = keys_of("a", 4), keys_of("b", 4)
    found = output(run_here("clear", idle, "--namespace", namespace("a").digest.hex()[:10]))
    assert "8 -> 4" in found
    assert namespace("a").label in found
    with hc.KvCache.attach(idle, root=root) as cache:
        assert (cache.match(a), cache.match(b)) == (0, 4)
    assert "4 -> 0" in output(run_here("clear", idle, "--namespace", namespace("b").label))
    with hc.KvCache.attach(idle, root=root) as cache:
        assert (cache.match(a), cache.match(b)) == (0, 0)
        store(cache, a)
    assert f"{PAGE_COUNT} of {PAGE_COUNT}" in output(run_here("clear", idle, "--everything"))
    assert "0 -> 0" in output(run_here("clear", idle))
    assert "'zz'" in failure(run_here("clear", idle, "--namespace", "zz"))
    assert failure(run_here("clear", idle, "--namespace", ""))
    if session is not None:
        assert session.match(a) == 0
        session.close()


def test_rm_refuses_while_sessions_live_unless_forced(root: str, run: Run, idle: str) -> None:
    session = hc.KvCache.attach(idle, root=root)
    assert "8 -> 4" in output(run("clear", idle, "--namespace", namespace("b").label))
    assert "chat" in failure(run("rm", idle))
    assert session.match(keys_of("a", 4)) == 4
    assert output(run("rm", idle, "--force")) == "chat: removed\n"
    assert session.orphaned
    assert session.match(keys_of("a", 4)) == 4
    assert hc.caches(root) == []
    session.close()
    hc.KvCache.open("chat", FORMAT, page_count=4, root=root).close()
    assert output(run("rm", "chat")) == "chat: removed\n"
    assert os.listdir(root) == []


def test_rm_takes_damaged_and_foreign_files(root: str, run_here: Run, idle: str) -> None:
    os.truncate(os.path.join(root, idle), 1000)
    assert output(run_here("rm", idle)) == "chat: removed\n"
    Path(root, "foreign").write_bytes(b"lost its magic")
    assert output(run_here("rm", "foreign")) == "foreign: removed\n"
    assert hc.caches(root) == []


@pytest.mark.portable
def test_errors_are_one_line_with_a_remedy(root: str, run_here: Run) -> None:
    for command in ("stat", "check", "clear", "rm"):
        assert "chat" in failure(run_here(command, "chat"))
        assert "slash" in failure(run_here(command, "a/b"))
    Path(root, "foreign").write_bytes(b"not ours at all")
    for command in ("stat", "check", "clear"):
        assert "foreign" in failure(run_here(command, "foreign"))
    os.chmod(root, 0o777)
    assert "0777" in failure(run_here("ls"))
    os.chmod(root, 0o700)
    assert "/none" in failure(run_here("--root", root + "/none", "stat", "chat"))
    assert output(run_here("--root", root + "/none", "ls")) == "no caches\n"


def test_wrong_usage_is_explained(run_here: Run) -> None:
    for arguments in (
        (),
        ("frobnicate",),
        ("stat",),
        ("clear", "x", "--everything", "--namespace=y"),
    ):
        ended = run_here(*arguments)
        assert ended.returncode == 2
        assert "usage: hostcache" in ended.stderr


def test_help_is_for_newcomers(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["stat", "--help"], ["rm", "-h"], ["--version"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("ls", "stat", "check", "clear", "rm", "demo", "HOSTCACHE_ROOT", "--force"):
        assert word in text
    assert hc.__version__ in text


def test_the_root_may_come_from_the_environment(
    root: str, idle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOSTCACHE_ROOT", root)
    assert cli.main(["check", idle]) == 0
    assert cli.main(["ls"]) == 0
    assert "chat" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough(root: str, idle: str) -> None:
    command = f"{sys.executable} -m hostcache --root {root} stat {idle} --json | head -c 1"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("{", "")


def test_what_others_wrote_can_not_draw_on_the_terminal(
    root: str, run: Run, start_child: Callable[[], Child]
) -> None:
    child = start_child()
    child.run(
        "open('/proc/self/comm', 'w').write('a\\x1b[31mred')\n"
        "late = hc.KvCache.attach('chat', root=root)"
    )
    assert "\x1b" not in output(run("stat", "chat"))


def test_the_demo_is_found_or_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hostcache.demo", None)
    assert cli.main(["demo"]) == 2
    assert "make demo" in capsys.readouterr().err
