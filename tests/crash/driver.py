"""Kills processes at kill points, one after another, and judges what is found.

    python driver.py PACKAGE_FOLDER MODE WHICH [SCENARIO ...]

Runs in a process of its own, on a package with a core that has kill points. MODE: `survivor` (a
session of ours lives through it), `alone` (all die, the next one verifies), `repair` (the one that
repairs is killed too). WHICH kill points: `first` or `ends` (first and last at each place), `all`.
Prints a JSON object a line: {"scenario", "points", "kills", "sites", "failures"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [sys.argv[1], str(Path(__file__).parent)]
# An editable install finds its package before any path does.
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("Scikit")]

from scenarios import FORMAT, SCENARIOS, Scenario, World, pattern, prompt  # noqa: E402

import hostcache as hc  # noqa: E402
from hostcache import _core  # noqa: E402

core: Any = _core
PARENT_DIES = 1  # prctl(PR_SET_PDEATHSIG)


class Trial:
    """One kill, in a root of its own."""

    def __init__(self, scenario: Scenario, mode: str) -> None:
        self.scenario = scenario
        self.mode = mode
        self.root = tempfile.mkdtemp(prefix="hostcache-crash-", dir="/dev/shm")
        self.ready: dict[bytes, bool] = {}

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def child(self, at: int) -> tuple[int, list[str], list[str]]:
        """Prepare and step in a forked process that dies at kill point `at` (0: at none). Its
        wait status, the kill points passed (if it lived), and the keys that were ready before.
        """
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
            self._victim(at, write)
        os.close(write)
        with os.fdopen(read) as said:
            lines = said.read().splitlines()
        _, status = os.waitpid(pid, 0)
        ready = [line[2:] for line in lines if line.startswith("r ")]
        return status, [line[2:] for line in lines if line.startswith("p ")], ready

    def _victim(self, at: int, write: int) -> None:
        try:
            world = World(self.root, self.scenario.pages)
            world.start()
            self.scenario.prepare(world)
            said = [f"r {key.hex()}" for key in ready_keys(world.cache)]
            os.write(write, ("\n".join(said) + "\n").encode())
            core.kill_at(at)
            self.scenario.step(world)
            passed = core.kill_points_passed()
            core.kill_at(0)
            for piece in range(0, len(passed), 100):
                os.write(write, "".join(f"p {p}\n" for p in passed[piece : piece + 100]).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 (a child must not go on as its parent)
            traceback.print_exc()
            os._exit(1)


def known_keys() -> list[bytes]:
    keys = [key.tobytes() for which in range(1, 10) for key in prompt(which, 9)]
    return keys + [prompt(which, 1)[0].tobytes() for which in range(10, 18)]


def ready_keys(cache: hc.KvCache) -> list[bytes]:
    return [key for key in known_keys() if cache.match([key]) == 1]


def judge(cache: hc.KvCache, must: list[str], patterned: bool) -> list[str]:
    """What is wrong after the death: findings, holds, lost or wrong pages, a cache that stops."""
    wrong = list(cache.check())
    stats = cache.stats()
    if stats.reserved or stats.pinned:
        wrong.append(f"{stats.reserved} reserved and {stats.pinned} pinned pages of the dead")
    if stats.free + stats.reserved + stats.ready != stats.page_count:
        wrong.append(f"the page equation: {stats}")
    ready = ready_keys(cache)
    wrong += [f"lost a ready page: {key}" for key in must if bytes.fromhex(key) not in ready]
    for key in ready if patterned else ():
        with cache.lookup([key]) as lease:
            if len(lease) and bytes(lease.view(0)) != pattern(key):
                wrong.append(f"wrong bytes under {key.hex()}")
    with cache.reserve(prompt(20, 8)) as pages:
        if len(pages) != 8 or pages.commit() != 8 or cache.match(prompt(20, 8)) != 8:
            wrong.append("it does not go on")
    return wrong + list(cache.check())


def repair_and_die(trial: Trial, at: int) -> int:
    """A newcomer attaches, checks and sweeps, and dies at kill point `at`; its wait status."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
        core.kill_at(at)
        with World(trial.root, trial.scenario.pages).open() as cache:
            cache.check()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def try_at(scenario: Scenario, mode: str, at: int, repair_at: int = 0) -> tuple[bool, list[str]]:
    """Whether the process died at that point (it may pass fewer, where a survivor's timer does
    part of the work), and what is wrong after.
    """
    with Trial(scenario, mode) as trial:
        survivor = None
        if mode == "survivor":
            survivor = World(trial.root, scenario.pages).open()
        status, _, ready = trial.child(at)
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not died and status != 0:
            return False, [f"the process ended with status {status} instead of being killed"]
        if repair_at:
            repair_and_die(trial, repair_at)
        cache = survivor or World(trial.root, scenario.pages).open()
        if cache.info["replaced"]:
            return died, [f"the cache was replaced: {cache.info['replaced']}"]
        wrong = judge(cache, ready if scenario.keeps else [], scenario.pages < 1000)
        cache.close()
        return died, wrong + judge_another(trial.root)


def judge_another(root: str) -> list[str]:
    """A cache whose maker or remover died is there whole or not at all, and can be made."""
    there = [f"{info.name}: {info.problem}" for info in hc.caches(root) if info.problem]
    with hc.KvCache.open("another", FORMAT, page_count=4, root=root) as another:
        replaced = [another.info["replaced"]] if another.info["replaced"] else []
        return there + replaced + another.check()


def chosen(points: list[str], which: str) -> list[int]:
    """Numbers of the kill points to die at: `all`, or the `first` at each place in the code, or
    the first and the last (`ends`).
    """
    numbered = list(enumerate(points, start=1))
    if which == "all":
        return [n for n, _ in numbered]
    picked = {site: n for n, site in reversed(numbered)}.values()
    last = {site: n for n, site in numbered}.values() if which == "ends" else ()
    return sorted({*picked, *last})


def run(name: str, mode: str, which: str) -> dict[str, object]:
    scenario = SCENARIOS[name]
    with Trial(scenario, mode) as trial:
        survivor = World(trial.root, scenario.pages).open() if mode == "survivor" else None
        status, points, _ = trial.child(0)
        if status != 0:
            raise SystemExit(f"{name} does not run unharmed: status {status}")
        if survivor:
            survivor.close()
    failures: dict[str, list[str]] = {}
    kills = 0
    for at in chosen(points, which):
        for repair_at in range(3, 60, 14) if mode == "repair" else (0,):
            died, wrong = try_at(scenario, mode, at, repair_at)
            kills += died
            if wrong:
                failures[f"{at} ({points[at - 1]}), repair {repair_at}"] = wrong[:5]
    sites = sorted(set(points))
    return {"points": len(points), "kills": kills, "sites": sites, "failures": failures}


def main() -> None:
    mode, which = sys.argv[2:4]
    for name in sys.argv[4:] or SCENARIOS:
        print(json.dumps({"scenario": name, **run(name, mode, which)}), flush=True)


if __name__ == "__main__":
    main()
