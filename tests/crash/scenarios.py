"""What a process does while it is killed: each scenario prepares a cache, then does one thing.

`prepare` runs unharmed and leaves what the step needs in `world`; `step` is killed at one kill
point after another. `keeps` says whether all pages that were ready before the step must be ready
after it (not where the step evicts or clears).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import hostcache as hc
from hostcache.keys import KeyArray

PAGE_BYTES = 4096
PAGES = 24
FORMAT = hc.PageFormat(PAGE_BYTES, 16)
NAMESPACE = hc.Namespace(
    model="crash", weights="sha256:" + 64 * "1", dtype="uint8", layout="pattern"
)
NAME = "crash"


def prompt(which: int, count: int) -> KeyArray:
    """Keys of the first pages of a prompt."""
    return hc.prefix_keys(range(which << 20, (which << 20) + 16 * count), 16, NAMESPACE)


def pattern(key: bytes) -> bytes:
    """What the page of a key holds, and nothing else may."""
    return (key * (PAGE_BYTES // len(key) + 1))[:PAGE_BYTES]


def fill(reservation: Any, keys: KeyArray) -> None:
    for i, key in enumerate(keys):
        reservation.view(i)[:] = pattern(key.tobytes())


class World:
    """One session, and what a scenario keeps between prepare and step."""

    def __init__(self, root: str, pages: int = PAGES) -> None:
        self.root = root
        self.pages = pages
        self.kept: dict[str, Any] = {}

    def open(self, **options: Any) -> hc.KvCache:
        return hc.KvCache.open(
            NAME, FORMAT, page_count=self.pages, root=self.root, namespace=NAMESPACE, **options
        )

    def start(self) -> None:
        self.cache = self.open()

    def store(self, which: int, count: int) -> None:
        with self.cache.reserve(prompt(which, count)) as pages:
            fill(pages, pages.keys)
            pages.commit()

    def reserve(self, which: int, count: int, **options: Any) -> hc.Reservation:
        pages = self.cache.reserve(prompt(which, count), **options)
        if not pages._hold.parts:
            fill(pages, pages.keys)
        return pages


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[World], None]
    step: Callable[[World], None]
    keeps: bool = True
    pages: int = PAGES


def nothing(_: World) -> None:
    """Prepares no more than the session."""


def two_prompts(world: World) -> None:
    world.store(1, 6)
    world.store(2, 6)


def full(world: World) -> None:
    for which in range(1, world.pages // 6 + 1):
        world.store(which, 6)


def leased(world: World) -> None:
    two_prompts(world)
    world.kept["lease"] = world.cache.lookup(prompt(1, 6))


def reserved(world: World) -> None:
    two_prompts(world)
    world.kept["pages"] = world.reserve(3, 5)


def viewed(world: World) -> None:
    reserved(world)
    world.kept["view"] = world.kept["pages"].view(4)


def kept_by_a_view(world: World) -> None:
    viewed(world)
    world.kept["pages"].commit(4)


def in_parts(world: World) -> None:
    two_prompts(world)
    taken = world.cache.reserve(prompt(3, 5), parts=2)
    world.kept["pages"] = taken
    world.kept["token"] = taken.token()


def one_part_done(world: World) -> None:
    in_parts(world)
    for part in range(2):
        claimed = world.cache.claim(world.kept["token"], part)
        assert claimed is not None
        fill(claimed, prompt(3, 5))
        world.kept[f"part{part}"] = claimed
    world.kept["part0"].commit()


def cleared(world: World) -> None:
    full(world)
    world.kept["lease"] = world.cache.lookup(prompt(1, 6))
    world.kept["pages"] = world.cache.lookup(prompt(2, 6))
    world.cache.clear()


def two_pieces(world: World) -> None:
    two_prompts(world)
    world.kept["pages"] = world.reserve(3, 3)
    keys = prompt(3, 6)
    world.kept["heir"] = world.cache.reserve(keys[3:], after=keys[2].tobytes())
    fill(world.kept["heir"], keys[3:])


def dead_neighbour(world: World) -> None:
    """Another process dies with a lease, a reservation and a claimed part."""
    in_parts(world)
    if (child := os.fork()) == 0:
        other = World(world.root, world.pages)
        other.start()
        held = [other.cache.lookup(prompt(1, 6)), other.reserve(4, 4)]
        held.append(other.cache.claim(world.kept["token"], 0))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def large_hold(world: World) -> None:
    world.kept["pages"] = world.cache.reserve(prompt(5, 2500))


def large_tree(world: World) -> None:
    keys = prompt(5, 2500)
    world.cache.reserve(keys).commit()


def commit(world: World) -> None:
    world.kept["pages"].commit()


def end(name: str) -> Callable[[World], None]:
    def step(world: World) -> None:
        world.kept.pop(name).end()

    return step


def lose_view(world: World) -> None:
    world.kept.pop("view").release()


def claim_both(world: World) -> None:
    for part in range(2):
        assert world.cache.claim(world.kept["token"], part) is not None


def unrelated(world: World) -> None:
    keys = np.concatenate([prompt(which, 1) for which in range(10, 18)])
    with world.cache.reserve(keys, linked=False) as pages:
        fill(pages, pages.keys)
        pages.commit()
    with world.cache.lookup(keys) as lease:
        assert len(lease) == len(keys)


def new_namespace(world: World) -> None:
    other = hc.Namespace(model="b", weights="sha256:" + 64 * "2", dtype="uint8", layout="x")
    hc.KvCache.open(NAME, FORMAT, page_count=PAGES, root=world.root, namespace=other).close()


def make_another(world: World) -> None:
    hc.KvCache.open("another", FORMAT, page_count=4, root=world.root).close()


SCENARIOS = {
    "make": Scenario(two_prompts, make_another),
    "remove": Scenario(make_another, lambda world: hc.remove("another", world.root)),
    "open": Scenario(two_prompts, lambda world: world.open().close()),
    "namespace": Scenario(two_prompts, new_namespace),
    "close": Scenario(reserved, lambda world: world.cache.close()),
    "lookup": Scenario(two_prompts, lambda world: world.cache.lookup(prompt(1, 6)).release()),
    "lookup_parts": Scenario(
        two_prompts, lambda world: world.cache.lookup(prompt(1, 6), parts=3).release()
    ),
    "lookup_gaps": Scenario(
        two_prompts,
        lambda world: world.cache.lookup(
            np.concatenate([prompt(1, 3), prompt(3, 2), prompt(2, 6)]), gaps=True
        ).release(),
    ),
    "release": Scenario(leased, end("lease")),
    "reserve": Scenario(two_prompts, lambda world: world.reserve(3, 6).abort()),
    "reserve_evicting": Scenario(full, lambda world: world.reserve(9, 9).abort(), keeps=False),
    "store_behind_a_hit": Scenario(full, lambda world: world.store(1, 9), keeps=False),
    "reserve_after_clear": Scenario(cleared, lambda world: world.store(1, 6), keeps=False),
    "commit": Scenario(reserved, commit),
    "commit_some": Scenario(reserved, lambda world: world.kept["pages"].commit(2)),
    "abort": Scenario(reserved, lambda world: world.kept["pages"].abort()),
    "commit_under_a_view": Scenario(viewed, commit),
    "commit_some_under_a_view": Scenario(viewed, lambda world: world.kept["pages"].commit(2)),
    "abort_under_a_view": Scenario(viewed, lambda world: world.kept["pages"].abort()),
    "last_view": Scenario(kept_by_a_view, lose_view),
    "claim": Scenario(in_parts, claim_both),
    "end_with_parts": Scenario(in_parts, end("pages")),
    "last_part": Scenario(one_part_done, lambda world: world.kept["part1"].commit()),
    "failed_part": Scenario(one_part_done, lambda world: world.kept["part1"].abort()),
    "end_under_a_part": Scenario(one_part_done, end("pages")),
    "clear": Scenario(full, lambda world: world.cache.clear(), keeps=False),
    "clear_everything": Scenario(
        full, lambda world: world.cache.clear(everything=True), keeps=False
    ),
    "commit_before_an_heir": Scenario(two_pieces, commit),
    "commit_of_an_heir": Scenario(two_pieces, lambda world: world.kept["heir"].commit()),
    "abort_before_an_heir": Scenario(two_pieces, lambda world: world.kept["pages"].abort()),
    "unrelated_keys": Scenario(two_prompts, unrelated),
    "sweep": Scenario(dead_neighbour, lambda world: world.cache.stats()),
    "abort_in_steps": Scenario(
        large_hold, lambda world: world.kept["pages"].abort(), keeps=False, pages=2600
    ),
    "clear_in_steps": Scenario(
        large_tree, lambda world: world.cache.clear(), keeps=False, pages=2600
    ),
}
